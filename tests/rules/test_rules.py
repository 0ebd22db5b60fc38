"""Rules: equal to torch in float64, refused with file and line where they leave the vocabulary."""

import linecache
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch

from shardopt.errors import RuleError
from shardopt.rules import sqrt, where
from shardopt.rules.adam import adam
from shardopt.rules.rule import rule
from shardopt.rules.scalars import one_minus_power
from shardopt.rules.sgd import sgd
from tests.support.cases import CASES, Case, Keywords, Zoo, fill_gradients
from tests.support.oracle import Array, Oracle

STEPS = 12  # RAdam rectifies from the sixth on, ASGD averages from the fifth
SKIPPED = (3, {5, 6})  # this param has no gradient at these steps: no decay, no count
# Largest seen: 2.7e-14 (centered RMSprop; torch fuses multiply and add), 1.6e-14 where torch's 1 - beta2**t cancels.
RTOL = 2e-13
ALL = [pytest.param(case, keywords, id=f"{case}-{keywords}") for case in CASES for keywords in case.keywords]


# -- the arithmetic ----------------------------------------------------------------------------------------------------


@pytest.fixture
def float64() -> Iterator[None]:
    """torch keeps its scalar states (NAdam's mu_product, ASGD's eta) in fp32 unless this is the default."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check_parity(case: Case, keywords: Keywords, oracle_class: type[Oracle] = Oracle) -> None:
    """A free run in float64 beside the reference, params and states compared after each step."""
    params = [param for param in Zoo(torch.float64).parameters() if param.requires_grad]
    reference = case.reference(params, **keywords)
    group = reference.param_groups[0]
    oracle = oracle_class(case.rule, {**group}, [param.detach().numpy() for param in params])
    compare = Comparison()
    lr = group["lr"]
    for step in range(1, STEPS + 1):
        group["lr"] = oracle.group["lr"] = lr * (1 - 0.5 * step / STEPS)
        fill_gradients(params, "heavy_tailed" if step % 3 else "integers", step)
        if step in SKIPPED[1]:
            params[SKIPPED[0]].grad = None
        grads = [None if param.grad is None else param.grad.numpy() for param in params]
        reference.step()
        oracle.step(grads)
        for index, param in enumerate(params):
            state = reference.state[param]
            tensors = [name for name, value in state.items() if name in case.states and value is not None]
            assert tuple(tensors) == oracle.variant.states
            assert list(state) == [*["step"][: case.rule.counts_steps], *case.rule.carried, *tensors]
            compare(f"param {index}", oracle.params[index], param)
            for name in tensors:
                compare(f"{name} {index}", oracle.states[index][name], state[name])
            for name in case.rule.carried:
                compare(f"{name} {index}", np.array(oracle.carried[index].get(name, math.nan)), state[name])


class Comparison:
    """|ours - reference| <= RTOL * the largest magnitude that this element had so far; no absolute tolerance."""

    def __init__(self) -> None:
        self.scale: dict[str, Array] = {}

    def __call__(self, name: str, ours: Array, theirs: torch.Tensor) -> None:
        expected = theirs.detach().double().numpy()
        scale = self.scale[name] = np.maximum(self.scale.get(name, np.zeros_like(expected)), np.abs(expected))
        assert np.isfinite(expected).all() and ours.shape == expected.shape
        worst = np.max(np.abs(ours - expected) / np.where(scale == 0, 1, scale), initial=0.0)
        assert worst <= RTOL, f"{name}: off by {worst:.1e} of its magnitude, allowed {RTOL:.0e}"


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("case", "keywords"), ALL)
def test_rule_equals_torch(case: Case, keywords: Keywords) -> None:
    assert case.rule.states == case.states
    check_parity(case, keywords)


# -- the seven cheats, less the two that need ranks --------------------------------------------------------------------

SECOND_MOMENTS = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf"}


class NoStep(Oracle):
    def step(self, grads: Any) -> None:
        pass


class TwiceTheLearningRate(Oracle):
    factor = 2.0

    @property
    def plain_group(self) -> dict[str, Any]:
        group = super().plain_group
        return {**group, "lr": group["lr"] * self.factor}


class LearningRateOffByATenThousandth(TwiceTheLearningRate):
    factor = 1.0001


class SecondMomentZeroed(Oracle):
    def update(self, index: int, grad: Array) -> None:
        super().update(index, grad)
        for name in SECOND_MOMENTS & set(self.states[index]):
            self.states[index][name] *= 0


class DecayDropped(Oracle):
    @property
    def plain_group(self) -> dict[str, Any]:
        return {**super().plain_group, "weight_decay": 0.0}


class StepOffByOne(Oracle):
    def update(self, index: int, grad: Array) -> None:
        self.steps[index] += 1
        super().update(index, grad)
        self.steps[index] -= 1


def shows(cheat: type[Oracle], case: Case, keywords: Keywords) -> bool:
    """Whether this optimizer has what the cheat takes away."""
    if cheat is SecondMomentZeroed:
        return bool(SECOND_MOMENTS & set(case.states))
    if cheat is DecayDropped:
        return bool(keywords.get("weight_decay", case.name == "AdamW"))
    if cheat is StepOffByOne:
        return case.shows_step(keywords)
    return True


CHEATS = (
    NoStep,
    TwiceTheLearningRate,
    LearningRateOffByATenThousandth,
    SecondMomentZeroed,
    DecayDropped,
    StepOffByOne,
)
CHEATED = [
    pytest.param(cheat, case, shown, id=f"{cheat.__name__}-{case}")
    for cheat in CHEATS
    for case in CASES
    if (shown := [keywords for keywords in case.keywords if shows(cheat, case, keywords)])
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("cheat", "case", "shown"), CHEATED)
def test_parity_fails_under_each_cheat(cheat: type[Oracle], case: Case, shown: list[Keywords]) -> None:
    for keywords in (shown[0], *shown[1:][-1:]):  # the plainest, and the one that turns most on
        with pytest.raises(AssertionError, match=r"off by|not "):
            check_parity(case, keywords, cheat)


def test_small_gradient_survives_a_large_average() -> None:
    """With beta1 = 0 the first moment is the gradient; ``m + 1 * (g - m)`` would make it 0 here."""
    group = torch.optim.Adam([torch.zeros(1)], betas=(0.0, 0.999)).defaults
    oracle = Oracle(adam, group, [np.zeros(2)], np.float32)
    small = np.array([1e-3, 7.0], np.float32)
    for grad in (np.array([1e8, -3e12], np.float32), small):
        oracle.step([grad])
    assert oracle.states[0]["exp_avg"].tolist() == small.tolist()
    assert oracle.params[0].dtype == np.float32


# -- scalars -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 255, 256, 257, 2**24 - 1, 2**24, 2**24 + 1, 10**9, 2**31 + 1, 2**53])
@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.5, 0.9, 0.999, 1 - 1e-9, 1 - 2**-53])
def test_one_minus_power_is_exact(beta: float, step: int) -> None:
    with localcontext() as context:
        context.prec = 60
        expected = float(1 - Decimal(beta) ** step)
    assert one_minus_power(beta, step) == pytest.approx(expected, rel=3e-16, abs=0)


# -- what the decorator makes ------------------------------------------------------------------------------------------

SGD_GROUP = {"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}


def no_scalars(group: Any, step: int, carried: Any) -> dict[str, float]:
    return {}


def test_variant_follows_the_flags_and_nothing_else() -> None:
    plain = sgd.variant(SGD_GROUP)
    assert plain is sgd.variant({**SGD_GROUP, "lr": 7.0, "weight_decay": 0.3})  # so nothing is compiled twice
    assert plain.states == () and plain.scalars == ("weight_decay", "lr")
    heavy = sgd.variant({**SGD_GROUP, "momentum": 0.9})
    assert heavy != plain and heavy.states == ("momentum_buffer",)
    assert "0.0 - grad" in sgd.variant({**SGD_GROUP, "maximize": True}).source


def test_missing_scalar_carried_or_flag_is_named() -> None:
    @rule(scalars=no_scalars, carried=("product",))
    def forgetful(param: Any, grad: Any, state: Any, s: Any, flags: Any) -> Any:
        if flags.fast:
            grad = grad * s.lr
        return param - grad

    with pytest.raises(
        RuleError, match=r"'fast' to the optimizer's defaults.*'forgetful' asks for flags.fast.*\['lr'\]"
    ):
        forgetful.variant({"lr": 1.0})
    for fast, missing in ((True, "lr"), (False, "product")):
        variant = forgetful.variant({"fast": fast})
        with pytest.raises(RuleError, match=f"'forgetful' needs the scalar '{missing}'"):
            forgetful.evaluate(variant, {}, 1, {})


def test_names_of_a_rule_cannot_meet_those_of_a_kernel() -> None:
    @rule(scalars=no_scalars)
    def shadowing(p: Any, param: Any, state: Any, s: Any) -> Any:
        grad = p + param
        i = grad * 2
        i += 1
        row = where((i > 3) & (p != 0), i, -param)
        return row

    oracle = Oracle(shadowing, {}, [[1.0, 0.0]])
    oracle.step([[2.0, 5.0]])
    assert oracle.params[0].tolist() == [7.0, -5.0]
    assigned = {line.split(" = ")[0] for line in shadowing.variant({}).source.splitlines()}
    assert assigned == {"local_grad", "local_i", "local_row", "param"}


@pytest.mark.parametrize("names", [("step",), ("master",), ("a", "a"), ("a b",)])
def test_state_names_that_would_meet_another_entry(names: tuple[str, ...]) -> None:
    with pytest.raises(RuleError, match="would meet another entry of the state dict"):
        rule(scalars=no_scalars, states=names)
    with pytest.raises(RuleError, match="would meet another entry of the state dict"):
        rule(scalars=no_scalars, states=names[:1], carried=names if len(names) == 1 else names[1:])


# -- what the decorator refuses ----------------------------------------------------------------------------------------

BAD: list[Any] = []
OUTSIDE = 2.0


def bad(why: str) -> Callable[[Callable[..., Any]], None]:
    """A row of the table: a function that is no rule, and what the error says. The line at fault ends in `# here`."""
    return lambda function: BAD.append(pytest.param(function, why, id=function.__name__))


@bad("only sqrt, abs, .* can be called")
def foreign_function(param: Any, grad: Any, state: Any, s: Any) -> Any:
    grad = grad * 2
    return param - math.exp(grad)  # here


@bad("sqrt takes 1 arguments")
def wrong_arity(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return param - sqrt(grad, 2)  # type: ignore[call-arg]  # here


@bad("can be called, without keywords")
def keyword_argument(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return param - sqrt(x=grad)  # here


def clamp(x: Any, low: Any, high: Any) -> Any:
    return x


@bad("clamp is <function clamp .* here, not the word")
def word_of_another_module(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return param - clamp(grad, -1, 1)  # here


@bad("names from outside cannot be read")
def outside_name(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return param - OUTSIDE * grad  # here


@bad("not defined in the rule")
def defined_under_a_flag_only(param: Any, grad: Any, state: Any, s: Any, flags: Any) -> Any:
    if flags.fast and not flags.slow:
        factor = 2.0
    if flags.fast:
        grad = factor * grad  # here
    return param - grad


@bad("one of < <= > >= == != at a time")
def chained_comparison(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return where(-1 < grad < 1, param, grad)  # here


@bad("And is not in the vocabulary")
def boolean_operator(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return where(grad > 0 and param > 0, param, grad)  # here


@bad("`if` asks for flags.<name> only")
def branch_on_a_value(param: Any, grad: Any, state: Any, s: Any) -> Any:
    if grad > 0:  # here
        grad = grad * 2
    return param - grad


@bad("IfExp is not in the vocabulary")
def conditional_expression(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return grad if param > 0 else param  # here


@bad("flags may only be asked by `if flags.<name>:`")
def flag_as_a_number(param: Any, grad: Any, state: Any, s: Any, flags: Any) -> Any:
    return param - flags.fast * grad  # here


@bad("must end with `return <the new param>`")
def no_return(param: Any, grad: Any, state: Any, s: Any) -> Any:  # here
    param = param - grad


@bad("only assignments and `if flags.<name>:`")
def early_return(param: Any, grad: Any, state: Any, s: Any, flags: Any) -> Any:
    if flags.fast:
        return param - grad  # here
    return param


@bad("only assignments and `if flags.<name>:`")
def loop(param: Any, grad: Any, state: Any, s: Any) -> Any:
    for _ in range(3):  # here
        param = param - grad
    return param


@bad(r"'velocity' is not among the declared states \('momentum',\)")
def unknown_state(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return param - state.velocity  # here


@bad("a state holds numbers")
def truth_in_a_state(param: Any, grad: Any, state: Any, s: Any) -> Any:
    state.momentum = grad > 0  # here
    return param - state.momentum


@bad("only state.<name> and s.<name> can be read")
def attribute_of_the_gradient(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return param - grad.data  # here


@bad("assign to a local name or to state.<name>")
def assigned_scalar(param: Any, grad: Any, state: Any, s: Any) -> Any:
    s.lr = 1.0  # here
    return param - s.lr * grad


@bad("assign to a local name or to state.<name>")
def assigned_flag(param: Any, grad: Any, state: Any, s: Any, flags: Any) -> Any:
    flags.fast = 1.0  # here
    return param - grad


@bad("this argument cannot be assigned")
def assigned_argument(param: Any, grad: Any, state: Any, s: Any) -> Any:
    state = grad  # here
    return param - state


@bad("this is a word of the vocabulary")
def assigned_word(param: Any, grad: Any, state: Any, s: Any) -> Any:
    maximum = grad  # here
    return param - maximum


@bad("holds a number, here it would become a truth")
def changed_kind(param: Any, grad: Any, state: Any, s: Any) -> Any:
    positive = grad
    positive = grad > 0  # here
    return where(positive, param, grad)


@bad("Pow is not in the vocabulary")
def power(param: Any, grad: Any, state: Any, s: Any) -> Any:
    param -= grad**2  # here
    return param


@bad("Pow is not in the vocabulary")
def augmented_power(param: Any, grad: Any, state: Any, s: Any) -> Any:
    grad **= 2  # here
    return param - grad


@bad("a comparison is needed here")
def number_for_a_truth(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return where(grad, param, grad)  # here


@bad("a number is needed here")
def truth_for_a_number(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return param - (grad > 0) * grad  # here


@bad("a number is needed here")
def returned_truth(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return param > grad  # here


@bad("not a finite fp32 number")
def literal_too_large(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return param - 3.5e38 * grad  # here


@bad("would be 0 in fp32")
def literal_too_small(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return param - grad / (grad + -1e-46)  # here


@bad("literals are numbers")
def literal_truth(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return param - -True * grad  # here


@bad("Not is not in the vocabulary")
def negated_comparison(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return where(not grad > 0, param, grad)  # here


@bad(r"takes \(param, grad, state, s\)")
def default_argument(param: Any, grad: Any, state: Any, s: Any = None) -> Any:  # here
    return param - grad


@bad(r"takes \(param, grad, state, s\)")
def too_few_arguments(param: Any, grad: Any, state: Any) -> Any:  # here
    return param - grad


@pytest.mark.parametrize(("function", "why"), BAD)
def test_bad_rule_is_refused_with_its_line(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(RuleError, match=why) as error:
        rule(scalars=no_scalars, states=("momentum",))(function)
    place = re.match(r"(.*):(\d+): rule '(\w+)'", str(error.value))
    assert place is not None and place[1] == __file__ and place[3] == function.__name__
    assert linecache.getline(__file__, int(place[2])).rstrip().endswith("# here")


def of_the_ends(param: Any, grad: Any, state: Any, s: Any) -> Any:
    return param - 3.4028234663852886e38 * grad - 1.401298464324817e-45


def test_literals_reach_the_ends_of_fp32() -> None:
    assert rule(scalars=no_scalars)(of_the_ends).name == "of_the_ends"


@pytest.mark.parametrize("function", [len, lambda param, grad, state, s: param], ids=["builtin", "lambda"])
def test_rule_without_a_def_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(RuleError, match="def"):
        rule(scalars=no_scalars)(function)
