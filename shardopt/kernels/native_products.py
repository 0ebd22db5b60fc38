"""The text of the native loop over elements whose row and column have factors; ``products.py`` has their table.

A product of factors is loaded where a state would be. The loop goes over runs, in each of which one factor stays::

    at = start
    while at < start + count:
        ... the run that element ``at`` is in, the places of its factors, where it ends ...
        outer = load_f32(outer_at, outer_place)
        for i in range(at, stop):
            state_root = outer * load_f32(inner_at, inner_place + i - at)
            ... loads, the rule, stores ...
        at = stop
"""

from .products import COLUMNS, DIMS, FIRST, INNER, INNER_STEP, OUTER, OUTER_STEP, RUN, SLOWER

_COLUMNS = {
    "first_of_param": FIRST,
    "outer_at": OUTER,
    "inner_at": INNER,
    "run": RUN,
    "outer_step": OUTER_STEP,
    "inner_step": INNER_STEP,
    "dims": DIMS,
}
# Of the param that a block belongs to.
OF_BLOCK = [
    f"place = row * {COLUMNS}",
    *(f"{name} = load_i64(products, place + {column}, TABLE)" for name, column in _COLUMNS.items()),
]
# The places of the factors of element ``at``, and where its run ends.
_RUN = f"""\
number = (at + first_of_param) // run
inside = at + first_of_param - number * run
outer_place = inside * outer_step
inner_place = inside * inner_step
for dim in range(dims):
    slower = place + {SLOWER} + 3 * dim
    size = load_i64(products, slower, TABLE)
    digit = number % size
    number = number // size
    outer_place += digit * load_i64(products, slower + 1, TABLE)
    inner_place += digit * load_i64(products, slower + 2, TABLE)
stop = min(at + run - inside, start + count)
outer = load_f32(outer_at, outer_place, TABLE)
"""


def loop_over_runs(product: str, body: list[str]) -> list[str]:
    """Returns the loop over a block with a product: that of nearly all params, which LLVM vectorizes, and another."""
    plain = f"state_{product} = outer * load_f32(inner_at, inner_place + (i - at), TABLE)"
    outer = "load_f32(outer_at, outer_place + (i - at) * outer_step, TABLE)"
    inner = "load_f32(inner_at, inner_place + (i - at) * inner_step, TABLE)"
    return [
        "at = start",
        "while at < start + count:",
        *(f"    {line}" for line in _RUN.splitlines()),
        "    if outer_step == 0 and inner_step == 1:",
        "        for i in range(at, stop):",
        *(f"            {line}" for line in (plain, *body)),
        "    else:",
        "        for i in range(at, stop):",
        *(f"            {line}" for line in (f"state_{product} = {outer} * {inner}", *body)),
        "    at = stop",
    ]
