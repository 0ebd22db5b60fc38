"""``save_pretrained()`` at stage 3, on one rank or on all: files of the whole model, which no rank holds."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardopt import ShardedAdamW, StateError, Tuning
from tests.support.launch import launch
from tests.support.memory import peak_above
from tests.support.training import raises

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs the extra 'frameworks': pip install .[frameworks]"
)


def make_model() -> Any:
    """77 MB in fp32, in params of at most 1 MB. Input and output embeddings are tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=24, n_embd=256, n_head=4, vocab_size=1000, n_positions=64, **ends))


def files_of(folder: Path) -> list[str]:
    return sorted(each for each in os.listdir(folder) if "safetensors" in each)


def saves(root: str) -> None:
    from accelerate import Accelerator
    from safetensors import safe_open
    from safetensors.torch import load, load_file, save_file
    from safetensors.torch import save as to_bytes
    from transformers import GPT2LMHeadModel

    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), make_model()
    opt = ShardedAdamW(model, lr=1e-2, stage=3, tuning=Tuning(keep_below=600, live_bytes=0))
    tokens = torch.arange(16).reshape(2, 8) + rank
    model(input_ids=tokens, labels=tokens).loss.backward()
    opt.step()
    with opt.unsharded():
        expected: dict[str, Tensor] = {name: each.detach().clone() for name, each in model.named_parameters()}
    nbytes = sum(each.nbytes for each in expected.values())
    bound = nbytes / 2  # a few times the largest param, and what is imported meanwhile
    accelerator = Accelerator(cpu=True)
    folders = {each: Path(root) / each for each in ("one file", "many", "on all ranks", "accelerate")}

    if rank == 0:
        with peak_above() as peak:
            model.save_pretrained(folders["one file"])
        assert peak.nbytes < bound, peak.nbytes
        with peak_above() as peak:
            model.save_pretrained(folders["many"], max_shard_size="9MB")
        assert peak.nbytes < bound, peak.nbytes
    dist.barrier()
    for name, save in (
        ("on all ranks", lambda: model.save_pretrained(folders["on all ranks"], max_shard_size="9MB")),
        ("accelerate", lambda: accelerator.save_model(model, folders["accelerate"], max_shard_size="9MB")),
    ):
        with peak_above() as peak:
            save()
        assert peak.nbytes < bound, (name, peak.nbytes)
        dist.barrier()

    for folder in folders.values():
        files = files_of(folder)
        tensors = [load_file(folder / each) for each in files if each.endswith(".safetensors")]
        found = {name: each for own in tensors for name, each in own.items()}
        assert len(found) == sum(map(len, tensors)) and found.keys() == expected.keys()
        assert all(each.equal(expected[name]) for name, each in found.items())
        if folder.name == "one file":
            assert files == ["model.safetensors"]
            continue
        assert len(files) > 5 and all(sum(each.nbytes for each in own.values()) <= 9e6 for own in tensors)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == nbytes and index["weight_map"].keys() == expected.keys()
    again = GPT2LMHeadModel.from_pretrained(folders["many"])
    assert all(each.equal(expected[name]) for name, each in again.named_parameters())

    if rank == 0:  # nothing is left of a file that could not be written
        parts = {name: each for name, each in model.state_dict().items() if name in expected}
        with pytest.raises(OSError):
            save_file(parts, folders["many"])
        assert not [each for each in os.listdir(root) if ".part-" in each]
        # As bytes, and without metadata, as plain tensors: readers take a file's metadata for its framework's name.
        assert all(each.equal(expected[name]) for name, each in load(to_bytes(parts)).items())
        plain, ours = Path(root) / "plain", Path(root) / "ours"
        save_file({name: each.clone() for name, each in expected.items()}, plain)
        save_file(parts, ours)
        assert load_file(ours).keys() == load_file(plain).keys()
        for path in (plain, ours):
            with safe_open(path, "pt") as file:
                assert file.metadata() is None
        del parts  # with the memory of their values, which could be saved later, too
    dist.barrier()
    # Parts of a moment that has passed are refused.
    kept = {name: each for name, each in model.state_dict().items() if name in expected}
    dist.barrier()
    opt.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    opt.step()
    with raises(StateError, "before the next step"):
        save_file(kept, Path(root) / f"late {rank}")
    assert not (Path(root) / f"late {rank}").exists()
    opt.close()


def test_no_rank_holds_the_model(tmp_path: Path) -> None:
    launch(saves, str(tmp_path), frameworks=True)
