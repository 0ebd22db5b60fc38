"""Wrong uses: a clear error on every rank, nothing changed, in time."""

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.testing._internal.two_tensor import TwoTensor

from shardopt import (
    BindingError,
    CommunicationError,
    DisagreementError,
    ShardedAdamW,
    ShardedSGD,
    ShardoptError,
    Tuning,
    save_checkpoint,
)
from tests.support.absence import LATER, SOON
from tests.support.cases import fill_gradients
from tests.support.moments import Moments
from tests.support.ranks import Pool
from tests.support.training import Net, digest, raises, raw, refused, with_gradient

# -- wrong uses --------------------------------------------------------------------------------------------------------


def wrong_params() -> None:
    first = with_gradient(Parameter(torch.ones(8)))
    refused([first, with_gradient(Parameter(first.detach()[2:6]))], BindingError, "share memory", "param 0", "param 1")
    refused([first, with_gradient(Parameter(first.detach().view(2, 4)))], BindingError, "share memory")
    expanded = Parameter(torch.ones(3).expand(2, 3))
    expanded.grad = torch.ones(2, 3)
    refused([first, expanded], BindingError, "one place in memory")
    refused([first, Parameter(torch.ones(3, device="meta"))], BindingError, "meta")
    refused([first, with_gradient(Parameter(torch.ones(3, dtype=torch.float64)))], ShardoptError, "float64")
    sparse = Parameter(torch.ones(4, 3))
    sparse.grad = torch.zeros(4, 3).to_sparse()
    before = raw(sparse), raw(first)
    with raises(ShardoptError, "sparse"):
        ShardedAdamW([first, sparse]).step()
    assert before == (raw(sparse), raw(first))
    with raises(TypeError, "complex"):
        ShardedAdamW([first, Parameter(torch.ones(3, dtype=torch.complex64))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch only warns of duplicates
        with raises((ValueError, BindingError), "twice"):  # type: ignore[arg-type]
            ShardedAdamW([first, first]).step()
    with raises(ValueError, "more than one parameter group"):
        ShardedAdamW([{"params": [first]}, {"params": [first]}])
    for flag in ("differentiable", "capturable"):
        with raises(ShardoptError, flag):
            ShardedAdamW([first], **{flag: True})
    with raises(BindingError, "use a dense param"):
        ShardedAdamW([first, Parameter(torch.eye(3).to_sparse())]).step()
    with raises(BindingError, "a torch.optim optimizer of its own", "TwoTensor"):
        ShardedAdamW([first, Parameter(TwoTensor(torch.ones(3), torch.ones(3)))]).step()
    for options, kind in (
        ({"stage": 2}, ValueError),
        ({"max_grad_norm": -1.0}, ValueError),
        ({"tuning": {}}, TypeError),
    ):
        with raises(kind, next(iter(options))):
            ShardedAdamW([first], **options)
    scripted = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(2, 2)))
    with raises(TypeError, "0 is a ScriptModule"):
        ShardedAdamW(scripted)
    # After all these refusals the param still trains.
    opt = ShardedAdamW([first])
    before = raw(first), raw(first)
    opt.step()
    assert raw(first) != before[0]


def moved_params() -> None:
    for change in ("recast", "resized", "released"):
        for world_wide in (True, False):
            model = Net()
            opt = ShardedAdamW(model.parameters())
            fill_gradients(model.parameters(), "integers", 0)
            opt.step()
            fill_gradients(model.parameters(), "integers", 1)
            victim = model.out.weight
            kept, before = victim.data, digest(opt)
            if world_wide or dist.get_rank() == 0:
                if change == "recast":
                    victim.grad = None
                    victim.data = kept.bfloat16()
                    victim.grad = torch.ones_like(victim)
                elif change == "resized":
                    victim.grad = None
                    victim.data = kept[:1]
                else:
                    victim.grad = None
                    victim.data = torch.empty(0)
            with raises((BindingError, DisagreementError), "moved"):  # type: ignore[arg-type]
                opt.step()
            if world_wide or dist.get_rank() == 0:
                victim.grad = None
                victim.data = kept
            assert digest(opt) == before
            fill_gradients(model.parameters(), "integers", 1)
            opt.step()
            assert digest(opt) != before


def test_wrong_uses(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(wrong_params, world=world)
        ranks.run(moved_params, world=world)


def test_calls_that_need_what_was_not_given() -> None:
    """Each says what to give; nothing was done, and the optimizer goes on."""
    param = Parameter(torch.ones(3))
    opt = ShardedSGD([param], lr=0.5)
    for call, words in (
        (opt.bind, "bind() takes a module over, and none was handed over"),
        (opt.reduce_gradients, "without the module shardopt reduces no gradients"),
    ):
        with raises(ShardoptError, words):
            call()
    for _ in range(2):  # before anything is bound, and behind a step
        with raises(ShardoptError, "construct the optimizer with ema="), opt.unsharded(ema=True):
            raise AssertionError("not to be reached")
        param.grad = torch.ones(3)
        opt.step()
    assert param.tolist() == [0.0, 0.0, 0.0] and opt.updates == 2


# -- deadlines ---------------------------------------------------------------------------------------------------------


def never_comes(folder: Path) -> str:
    """To the first step, where no other wait is cut short. The group itself would wait for longer than the job."""
    model, moments = Net(), Moments(folder)
    opt = ShardedAdamW(model.parameters(), tuning=Tuning(timeout=SOON))
    fill_gradients(model.parameters(), "integers", 0)
    found = ""
    if dist.get_rank() == 0:
        try:
            opt.step()
        except CommunicationError as error:
            found = str(error)
        moments.say("given up")
    moments.wait("given up")
    dist.destroy_process_group()
    return found


def test_a_rank_that_never_comes(ranks: Pool, tmp_path: Path) -> None:
    """The other one says what it waited for, behind the deadline that the optimizer was given."""
    found = ranks.run(never_comes, tmp_path, world=2, timeout=LATER)[0]
    assert "agreeing on the step" in found and "rank 0 of 2" in found, found


def says_what_to_do() -> None:
    """What a new user does wrong: the error begins with the call to make next."""
    net = Net()
    for options, kind, words in (
        ({"process_group": "gloo"}, TypeError, "pass what dist.new_group() or init_device_mesh() returned"),
        ({"tuning": {"timeout": 3}}, TypeError, "write tuning=shardopt.Tuning(**given)"),
        ({"reduce_dtype": "bf16"}, ValueError, "write reduce_dtype=torch.bfloat16"),
    ):
        with raises(kind, words):
            ShardedAdamW(net, **options)
    with raises(TypeError, "pass the model, or model.parameters()", "found the class Net"):
        ShardedAdamW(Net)  # type: ignore[arg-type]
    plain = torch.optim.AdamW(net.parameters())
    for arguments, words in (
        ((net, plain), "found torch.optim.adamw.AdamW"),
        ((plain, net), "give the arguments in the order directory, module, optimizer"),
    ):
        with raises(TypeError, words):
            save_checkpoint("nowhere", *arguments)
    for stage in (1, 2, 3):
        net = Net()
        opt = ShardedAdamW(net, stage=stage, tuning=Tuning(keep_below=1))
        net(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        other = ShardedAdamW(net.parameters())
        with raises(BindingError, "give a param to one optimizer, or close() the other one first"):
            other.step()
        opt.step()
        with raises(ShardoptError, "move and cast the model before"):
            net.double()
        opt.close()


def test_errors_say_what_to_do(ranks: Pool) -> None:
    ranks.run(says_what_to_do, world=2)
