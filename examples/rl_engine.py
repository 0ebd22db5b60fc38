"""Reinforcement learning in miniature: ranks that train at stage 3 hand their weights to the workers of an engine.

torchrun --standalone --nproc-per-node 4 examples/rl_engine.py               two ranks train, two serve
"""

import torch
import torch.distributed as dist

import shardopt

TRAINERS, ENGINES, ROUNDS = [0, 1], [2, 3], 3


def policy() -> torch.nn.Module:
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))


def train(group: dist.ProcessGroup, bridge: dist.ProcessGroup) -> None:
    model = policy()
    opt = shardopt.ShardedAdamW(model, lr=1e-3, stage=3, process_group=group)
    metadata = {name: (each.shape, each.dtype) for name, each in opt.weights_metadata(torch.bfloat16).items()}
    if dist.get_rank() == 0:  # alone in both groups
        dist.broadcast_object_list([metadata], src=0, group=bridge)
    for step in range(ROUNDS):
        for _, whole in opt.weights(bucket_bytes=256 << 20, dtype=torch.bfloat16):  # on every rank that trains
            if dist.get_rank() == 0:
                dist.broadcast(whole, src=0, group=bridge)
        x = torch.randn(16, 64)  # in earnest: what the engine generated, and its rewards
        reward = torch.log_softmax(model(x), dim=-1)[:, 0].mean()
        (-reward).backward()
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0:
            print(f"round {step}: log-probability {reward.item():.4f}")


def serve(bridge: dist.ProcessGroup) -> None:
    model = policy().to(torch.bfloat16)
    received: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{}]
    dist.broadcast_object_list(received, src=0, group=bridge)
    for _ in range(ROUNDS):
        for name, (shape, dtype) in received[0].items():
            whole = torch.empty(shape, dtype=dtype)
            dist.broadcast(whole, src=0, group=bridge)
            model.load_state_dict({name: whole}, strict=False)
        print(f"engine {dist.get_rank()}: answers {model(torch.ones(1, 64, dtype=torch.bfloat16))[0, 0].item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train_group, bridge = dist.new_group(TRAINERS), dist.new_group([0, *ENGINES])
    if dist.get_rank() in TRAINERS:
        train(train_group, bridge)
    else:
        serve(bridge)
    dist.barrier()
    dist.destroy_process_group()
