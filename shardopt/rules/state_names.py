"""The names that states of shipped rules have: a script's own notes beside a state have other ones."""

from __future__ import annotations

# A key of this kind that an optimizer's own rule does not keep is of another optimizer, or of other flags.
STATE_NAMES = frozenset(
    {
        *("step", "master", "ema", "param", "grad"),
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "mu_product"),
        *("momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum"),
        *("ax", "eta", "mu", "prev", "step_size"),
        *("row_var", "col_var", "variance"),
    }
)
