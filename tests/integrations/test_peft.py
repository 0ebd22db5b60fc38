"""PEFT at stage 3. DoRA: an adapter reads the frozen weight that it adapts from outside of that one's module. QLoRA:
the base is bitsandbytes', and merged weights go to files.

Beside it, the same model and data with ``torch.optim.AdamW`` under DDP, and the unsharded model.
"""

from importlib import import_module, util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardopt import ShardedAdamW, Tuning, save_weights
from tests.support.comparing import raw
from tests.support.ranks import Pool
from tests.support.training import apart

pytestmark = pytest.mark.skipif(
    util.find_spec("peft") is None, reason="needs the extra 'frameworks': pip install .[frameworks]"
)

STEPS = 3
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def tiny_llama(width: int = 32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=48, max_position_embeddings=32, **sizes))


def make_model() -> Any:
    from peft import LoraConfig, get_peft_model

    model = tiny_llama()
    adapters = LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    return get_peft_model(model, adapters)


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
    return torch.randint(0, 48, (2, 12), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        tokens = tokens_of(step)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def trains() -> None:
    model = make_model()
    losses = train(DistributedDataParallel(model), torch.optim.AdamW(trained(model), **ADAMW))
    expected = values_of(model)
    for neighbours in (True, False):
        model = make_model()
        tuning = Tuning(bucket_bytes=20_000, keep_below=100, live_bytes=0, neighbours=neighbours)
        opt = ShardedAdamW(trained(model), module=model, **ADAMW, stage=3, tuning=tuning)
        torch.testing.assert_close(torch.tensor(train(model, opt)), torch.tensor(losses), rtol=2e-4, atol=2e-5)
        with opt.unsharded():
            assert apart(values_of(model), expected, values_of(make_model())) < 1e-3
        opt.close()


def test_dora(ranks_with_frameworks: Pool) -> None:
    ranks_with_frameworks.run(trains, world=2)


def quantized() -> Any:
    """nf4 layers of bitsandbytes under PEFT's adapters; scales of each are more than a block."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model, layer = tiny_llama(160), import_module("bitsandbytes.nn").Linear4bit
    for outer in list(model.modules()):
        for name, child in outer.named_children():
            if type(child) is nn.Linear and name != "lm_head":
                made = layer(
                    child.in_features, child.out_features, False, compute_dtype=torch.float32, quant_type="nf4"
                )
                made.load_state_dict({"weight": child.weight.detach()})
                setattr(outer, name, made.to("cpu"))
    model.is_loaded_in_4bit = True
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def merge(module: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """The base's weight as numbers, and the adapter added to it."""
    lora, base = (import_module(name) for name in ("peft.tuners.lora", "bitsandbytes"))
    if not isinstance(module, lora.LoraLayer | base.nn.Linear4bit):
        return None
    inner: Any = module.get_base_layer() if isinstance(module, lora.LoraLayer) else module
    name = "weight" if inner is module else "base_layer.weight"
    if own[name].is_meta:
        return {"weight": torch.empty(inner.weight.quant_state.shape, device="meta")}
    saved = {each.removeprefix(f"{name}."): tensor for each, tensor in own.items() if each.startswith(f"{name}.")}
    state = base.functional.QuantState.from_dict(saved, device=torch.device("cpu"))
    weight: Tensor = base.functional.dequantize_4bit(own[name], state)
    if inner is not module:
        weight = weight + own["lora_B.default.weight"] @ own["lora_A.default.weight"] * module.scaling["default"]
    return {"weight": weight}


def merged_by_peft(model: Any) -> dict[str, Tensor]:
    """Of an unsharded model, without the names of PEFT's wrappers."""
    lora, base, found = import_module("peft.tuners.lora"), import_module("bitsandbytes"), {}
    for name, module in model.base_model.model.named_modules():
        if isinstance(module, base.nn.Linear4bit):
            weight = base.functional.dequantize_4bit(module.weight, module.weight.quant_state)
            outer = model.base_model.model.get_submodule(name.removesuffix(".base_layer"))
            is_adapted = isinstance(outer, lora.LoraLayer)
            found[name.removesuffix(".base_layer")] = (
                weight + outer.get_delta_weight("default") if is_adapted else weight
            )
    return found


def qlora(path: str) -> None:
    from safetensors.torch import load_file

    model = quantized()
    first = float(model(input_ids=tokens_of(0), labels=tokens_of(0)).loss.detach())
    opt: Any = ShardedAdamW(trained(model), module=model, **ADAMW)
    losses = train(model, opt)
    assert losses[0] == first and len(set(losses)) == STEPS
    opt.close()
    expected = {name: raw(value) for name, value in model.state_dict().items()}
    for neighbours in (True, False):
        sharded = quantized()
        tuning = Tuning(keep_below=100, live_bytes=0, neighbours=neighbours)
        opt = ShardedAdamW(trained(sharded), module=sharded, **ADAMW, stage=3, tuning=tuning)
        assert train(sharded, opt) == losses
        assert {name: raw(each) for name, each in opt.weights()} == expected
        if torch.distributed.get_rank() == 0:  # PEFT's own files: the adapters alone
            sharded.save_pretrained(f"{path}/adapters")
            adapters = load_file(f"{path}/adapters/adapter_model.safetensors")
            named = {name.replace(".default", ""): each for name, each in model.state_dict().items() if "lora" in name}
            assert {name: raw(each) for name, each in adapters.items()} == {
                name: raw(each) for name, each in named.items()
            }
        save_weights(path, opt, merge=merge, prefix="base_model.model.", bytes_per_file=200_000)
        opt.close()
    torch.distributed.barrier()
    files = sorted(Path(path).glob("*.safetensors"))
    assert len(files) > 2
    found = {name: each for file in files for name, each in load_file(file).items()}
    tiny_llama(160).load_state_dict(found)
    wanted = merged_by_peft(model)
    assert len(wanted) == 14 and all(raw(found[f"{name}.weight"]) == raw(each) for name, each in wanted.items())


@pytest.mark.skipif(util.find_spec("bitsandbytes") is None, reason="pip install .[frameworks]")
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_qlora(ranks_with_frameworks: Pool, world: int, tmp_path: Path) -> None:
    ranks_with_frameworks.run(qlora, str(tmp_path), world=world)
