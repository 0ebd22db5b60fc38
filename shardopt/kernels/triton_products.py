"""The product of the factors of each element's row and column, in Triton; ``products.py`` has the table."""

import triton
import triton.language as tl


@triton.jit
def carried(ahead, digit, size, BLOCK: tl.constexpr):
    """Counts on from a digit below ``size``, by a block or less: returns how often it starts anew, and what it becomes.

    In 32 bits: a size beyond a block is passed at most once.
    """
    left = tl.minimum(size - digit, 2 * BLOCK).to(tl.int32)
    carries = tl.where(ahead < left, 0, 1 + (ahead - left) // tl.minimum(size, 2 * BLOCK).to(tl.int32))
    return carries, digit + ahead - carries.to(tl.int64) * size


@triton.jit
def product_of(
    products_ptr, row, start, within, places, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, NUM_PLAIN: tl.constexpr
):
    """Returns the products of a block [1, BLOCK] of the param of this row; zeros behind its end.

    Args:
        start: of the block in the shard.
        within: where the param has elements.
        NUM_PLAIN: columns of the table before those of each dimension.
    """
    row_ptr = products_ptr + row * COLUMNS
    plain = ()
    for column in tl.static_range(NUM_PLAIN):
        plain = plain + (tl.load(row_ptr + column),)  # noqa: RUF005
    first, outer_at, inner_at, run, outer_step, inner_step, _, dims = plain  # type: ignore[misc]
    dims_ptr = row_ptr + NUM_PLAIN
    number, inside = (start + first) // run, (start + first) % run
    outer = (inside + places) * outer_step
    inner = (inside + places) * inner_step
    if inside + BLOCK <= run:  # one run has all of the block
        for dim in range(dims):
            size = tl.load(dims_ptr + 3 * dim)
            outer += number % size * tl.load(dims_ptr + 3 * dim + 1)
            inner += number % size * tl.load(dims_ptr + 3 * dim + 2)
            number = number // size
    else:
        carries, digit = carried(places, inside, run, BLOCK)
        outer = digit * outer_step
        inner = digit * inner_step
        for dim in range(dims):
            size = tl.load(dims_ptr + 3 * dim)
            carries, digit = carried(carries, number % size, size, BLOCK)
            outer += digit * tl.load(dims_ptr + 3 * dim + 1)
            inner += digit * tl.load(dims_ptr + 3 * dim + 2)
            number = number // size
    outer_ptrs = outer_at.to(tl.pointer_type(tl.float32)) + outer
    inner_ptrs = inner_at.to(tl.pointer_type(tl.float32)) + inner
    return tl.load(outer_ptrs, mask=within, other=0) * tl.load(inner_ptrs, mask=within, other=0)
