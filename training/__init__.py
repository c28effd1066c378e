"""What runs on every rank."""
