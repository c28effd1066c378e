"""Models: a module with ``forward(inputs) -> logits`` and ``loss(batch) -> scalar mean loss``."""
