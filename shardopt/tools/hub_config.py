"""Builds the model of a Hugging Face ``config.json`` without its weights: only the shapes of its params."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ShardoptError, UnsupportedVersionError


def model_of(path: Path) -> nn.Module:
    """Returns the model on the meta device. It downloads nothing, and runs no code of the folder.

    Raises:
        ShardoptError: the file is not the config of a model that Transformers knows.
        UnsupportedVersionError: Transformers is missing.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ShardoptError(f"give a Hugging Face config.json, or a folder with one: {file}: {error}.") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ShardoptError(f"give a Hugging Face config.json: {file} has no model_type, so that its model is unknown.")
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedVersionError(
            f"pip install transformers, or give --params: {file} is read with Transformers, which is missing."
        )
    # Transformers reads it at import: some configs name weights of the hub, which their models would download.
    os.environ["HF_HUB_OFFLINE"] = "1"
    return _made(_without_code(config), file)


def _without_code(value: Any) -> Any:
    """Returns a config, and its nested configs, without their choice of kernels, which may be code of the hub."""
    if isinstance(value, list):
        return [_without_code(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: _without_code(each) for name, each in value.items() if not name.endswith("_implementation")}


def _made(config: dict[str, Any], file: Path) -> nn.Module:
    import transformers

    named = config.get("architectures") or ["a causal language model"]
    if not isinstance(named, list):
        raise ShardoptError(
            f"give a Hugging Face config.json: {file} has {named!r} as architectures, which is not a list."
        )
    name = named[0]
    try:
        settings = transformers.AutoConfig.for_model(**config)
        causal: Any = transformers.AutoModelForCausalLM
        make = getattr(transformers, name) if config.get("architectures") else causal.from_config
        if config.get("architectures") and not issubclass(make, transformers.PreTrainedModel):
            raise TypeError("it is not the class of a model")
        with torch.device("meta"):
            model: nn.Module = make(settings)
    except Exception as error:  # a wrong value may fail anywhere in the library
        raise ShardoptError(
            f"correct {file}, or give --params: Transformers {transformers.__version__} cannot build {name} from it "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]})."
        ) from error
    return model
