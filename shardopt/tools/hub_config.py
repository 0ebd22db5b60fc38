"""The model of a Hugging Face ``config.json``, without its weights: every param has the shape that it will have."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ShardoptError, UnsupportedVersionError


def model_of(path: Path) -> nn.Module:
    """Returns the model on the meta device; nothing is downloaded, and no code beside the config is run.

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
            f"{file} is read with Transformers, which is missing: pip install transformers, or give --params."
        )
    # Transformers reads it when it is imported: some configs name weights of the hub, and their models fetch them.
    os.environ["HF_HUB_OFFLINE"] = "1"
    return _made(_without_code(config), file)


def _without_code(value: Any) -> Any:
    """A config, and those in it, without the kernels that they choose: one may be code of the hub, or of its cache."""
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
    except Exception as error:  # of a library: what is wrong with a value shows anywhere in it
        raise ShardoptError(
            f"{file}: Transformers {transformers.__version__} cannot build {name} from it ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}). Correct the file, or give --params."
        ) from error
    return model
