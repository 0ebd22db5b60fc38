#!/usr/bin/env bash
# Train a byte-level GPT on the Python standard library with sharded AdamW: under a minute and a half on two CPU cores.
#
#   bash scripts/demo.sh                         one rank for each GPU, or two CPU ranks where there is none
#   bash scripts/demo.sh --optimizer torch       the same training with torch.optim.AdamW
#   bash scripts/demo.sh --dtype bf16 --steps 50 any other option: 'python examples/train_gpt.py --help' lists them
#
# The loss curve and the run's numbers are written to ./demo-output (--out DIR: elsewhere).
# OMP_NUM_THREADS sets the threads of each CPU rank (default: the cores shared out, at most 4).
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
esac
set_up

shape=$("$python" -c '
import os, torch
ranks = torch.cuda.device_count() or 2
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
print(ranks, max(1, min(4, cores // ranks)))
')
read -r ranks threads <<<"$shape"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
# Eight sequences a rank: any number of ranks can share the batch.
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    "$root/examples/train_gpt.py" --batch $((8 * ranks)) "$@"
