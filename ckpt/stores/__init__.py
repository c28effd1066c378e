"""The kinds of storage a run can live on, one a file."""
