# What every script here begins with; sourced, never run.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python

# Print the comment at the head of the script that was started.
usage() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"; }

set_up() { bash "$root/scripts/setup.sh"; }

has_nvidia_gpu() { nvidia-smi -L >/dev/null 2>&1; }
