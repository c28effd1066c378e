"""Datasets: an object with ``train``, ``val`` and ``identity()``; see ``training.data.protocol``."""
