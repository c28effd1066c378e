"""The Hydra configuration."""
