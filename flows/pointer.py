"""The MLflow loader of a checkpoint: `mlflow.pyfunc.load_model("models:/gpt@champion")` ends here.

A pointer model holds the checkpoint's address, not its weights; loading verifies what it reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _load_pyfunc(data_path: str) -> PointerModel:
    """Called by MLflow with the path of the pointer file."""
    address = json.loads(Path(data_path).read_text(encoding="utf-8"))
    from training.predict import load

    try:
        predictor = load(address["uri"])
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the checkpoint {address['uri']} (step {address['step']}) is gone: it was pruned or moved. "
            "Pin what you want to keep: python -m ckpt tag"
        ) from error
    return PointerModel(predictor)


class PointerModel:
    """What MLflow wraps: `predict` takes prompts (a list, a table's first column) and returns one dict for
    each."""

    def __init__(self, predictor: Any) -> None:
        self._predictor = predictor

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Predictions for prompts (text and loss each) or for rows of numbers (a class each)."""
        return self._predictor.predict(_rows(model_input), **(params or {}))


def _rows(model_input: Any) -> list[Any]:
    if isinstance(model_input, str):
        return [model_input]
    if hasattr(model_input, "columns"):
        table = model_input
        return list(table[table.columns[0]]) if len(table.columns) == 1 else table.to_numpy().tolist()
    return model_input.tolist() if hasattr(model_input, "tolist") else list(model_input)
