"""Write the tables of the README and the pages, from the newest committed results and the planner; nothing is measured.

python bench/readme.py            rewrite what stands between their markers
python bench/readme.py --check    exit code 1 if that would change something (a test asks)
"""

import argparse
import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch

import shardopt
from shardopt.config import Master, StateFormat
from shardopt.tools.decoder import transformer
from shardopt.tools.plan import plan
from shardopt.tools.ways import Way

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CPU, GPU = "amd-epyc-2-cores", "nvidia-h100-80gb-hbm3"
XEON = "intel-r-xeon-r-processor-2-cores"


def newest(name: str, device: str = CPU) -> dict[str, Any]:
    """The newest result of one benchmark on one machine; names begin with the date."""
    path = sorted(RESULTS.glob(f"????-??-??-{name}-{device}.json"))[-1]
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def interval(value: dict[str, Any], digits: int = 2) -> str:
    return f"{value['median']:.{digits}f} ({value['low']:.{digits}f} to {value['high']:.{digits}f})"


def percent(value: dict[str, Any]) -> str:
    return f"{100 * value['median']:.0f} %"


def kernel_table(kernels: dict[str, Any]) -> list[str]:
    rivals = {"torch fused": "torch fused", "torch foreach": "torch foreach", "torch loop": "torch for-loop"}
    lines = [
        "| optimizer, all fp32 | GB/s | of a copy | "
        + " | ".join(f"{title} takes" for title in rivals.values())
        + " |",
        "|---|---|---|---|---|---|",
    ]
    for row in kernels["results"]["rows"]:
        if row["dtype"] == "fp32" and row["what"] == "kernel":
            times = [row["speedups"].get(rival) for rival in rivals]
            cells = ["-" if each is None else f"{each['x']['median']:.2f}x" for each in times]
            lines.append(f"| {row['rule']} | {row['GB/s']:.0f} | {percent(row['of copy'])} | {' | '.join(cells)} |")
    return lines


def mixed_sentence(kernels: dict[str, Any]) -> str:
    row = next(
        row
        for row in kernels["results"]["rows"]
        if (row["rule"], row["dtype"], row["what"]) == ("AdamW", "bf16", "kernel")
    )
    others = [
        f"{name.replace('casts', 'upcast, update, downcast')} takes {each['x']['median']:.2f}x"
        for name, each in row["speedups"].items()
    ]
    return (
        f"AdamW with a bf16 gradient in and a bf16 param out beside fp32 master and states: {percent(row['of copy'])} "
        f"of a copy; {'; '.join(others)}."
    )


def train_table(trained: dict[str, Any]) -> list[str]:
    lines = ["| engine | step, x DDP | `optimizer.step()` | peak bytes a param |", "|---|---|---|---|"]
    for engine in trained["results"]["engines"].values():
        lines.append(
            f"| {engine['title']} | {interval(engine['step x DDP'])} | {1e3 * engine['optimizer s']['median']:.0f} ms "
            f"| {engine['peak bytes a param']:.1f} |"
        )
    return lines


def offload_table(results: dict[str, Any]) -> list[str]:
    lines = ["| engine | step, x in memory | `optimizer.step()` | peak bytes a param |", "|---|---|---|---|"]
    for engine in results["training"]["engines"].values():
        lines.append(
            f"| {engine['title']} | {interval(engine['step x in memory'])} "
            f"| {1e3 * engine['optimizer s']['median']:.0f} ms | {engine['peak bytes a param']:.1f} |"
        )
    return lines


def host_table() -> list[str]:
    """Host time of a step beside DDP's, of the smaller and the larger model, on one rank and on two."""
    one, two = (newest(f"host-{ranks}-ranks", XEON)["results"] for ranks in (1, 2))
    few, many = newest("host-1-ranks", XEON)["settings"]["blocks"]
    lines = [
        f"| engine, host time x DDP's | 1 rank, {few} blocks | {many} blocks "
        f"| 2 gloo ranks, {few} blocks | {many} blocks |",
        "|---|---|---|---|---|",
    ]
    for name in one:
        cells = [interval(each) for found in (one, two) for each in found[name]["over DDP"]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def null_section() -> str:
    """The host's work for a GPU, of one rank, where nothing computes: times beside DDP's, and the calls of a step."""
    result = newest("host-null-1-ranks", XEON)
    found, (few, many) = result["results"], result["settings"]["blocks"]
    lines = [
        f"On {result['machine']['device']}, torch {result['machine']['torch']}, Triton {result['machine']['triton']}; "
        f"{MEDIANS}; calls are those of {few} blocks:",
        "",
        f"| engine, host time | x DDP's, {few} blocks | {many} blocks | with the driver, {few} blocks "
        "| x FSDP2's | kernel launches a step | events | copies | waits of the host |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, each in found.items():
        calls = [its for its in each["calls"][f"{few} blocks"].values()]

        def count(*kinds: str, calls: list[dict[str, int]] = calls) -> int:
            return sum(its.get(kind, 0) for its in calls for kind in kinds)

        cells = [interval(value) for value in each["over DDP"]]
        cells += [interval(each["over DDP, with the driver"][0]), interval(each["over FSDP2"][0])]
        launches = count("kernel launches", "Triton launches", "library calls")
        copies = count("copies to the device", "copies to the host", "copies on the device")
        events = count("event records", "stream waits", "event queries")
        cells += [str(each) for each in (launches, events, copies, count("host waits"))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


MEDIANS = "medians of interleaved pairs, ratios within one run; in parentheses the 95 % interval"


def headline() -> str:
    """What the README promises: step and bytes beside DDP."""
    result = newest("peers-fp32")
    engines, settings = result["results"]["engines"], result["settings"]
    ddp = engines["ddp"]["peak bytes a param"]
    stage_2, stage_3 = (
        f"**{engine['step x DDP']['median']:.2f} of the time and {engine['peak bytes a param']:.1f} bytes a param**"
        for engine in (engines["module-2"], engines["module-3"])
    )
    return (
        f"Measured on {settings['ranks']} CPU ranks in {settings['dtype']}, beside DDP with torch's fused AdamW, where "
        f"a rank peaks at {ddp:.1f} bytes a param: a step at `stage=2` takes {stage_2}, at `stage=3` {stage_3} "
        "([all numbers](docs/measured.md))."
    )


def peers() -> str:
    """DDP, FSDP2, DeepSpeed and shardopt in the same rounds."""
    result = newest("peers-fp32")
    settings, machine, packages = result["settings"], result["machine"], result["results"]["packages"]
    ddp, *rest = result["results"]["engines"].values()
    others = [each for each in rest if each["largest loss difference to DDP"] > 0.02]
    return "\n".join(
        [
            f"A training step of a GPT of {result['results']['params'] / 1e6:.1f}M params on {settings['ranks']} gloo "
            f"ranks of {machine['device']}, {settings['dtype']}, torch {machine['torch']}, DeepSpeed "
            f"{packages['deepspeed']}: {MEDIANS}.",
            "",
            *train_table(result),
            "",
            f"The losses of {', '.join(each['title'] for each in others)} are not those of DDP: "
            f"{others[0]['last loss']:.2f} at the end, in place of {ddp['last loss']:.2f}."
            if others
            else "The losses of all are those of DDP.",
        ]
    )


def numbers() -> str:
    """The update, stages in fp32, disks, what a start takes."""
    kernels, cold = newest("kernels"), newest("cold-start")["results"]["seconds"]
    fp32 = newest("train-fp32")
    hooks, layout = newest("hooks", XEON)["results"], newest("plan")
    checkpoint, disk = newest("checkpoint")["results"], newest("offload")["results"]["disk"]
    over = fp32["results"]["shardopt-1 over zero"]
    machine = kernels["machine"]
    first, second = cold["first step"]["median"], cold["second step"]["median"]
    return "\n".join(
        [
            f"On {machine['device']} ({kernels['settings']['threads']} threads), torch {machine['torch']}: {MEDIANS}.",
            "",
            f"**The update** of {kernels['settings']['elements'] / 2**20:.0f}M elements, as bytes read and written "
            "over time, beside `dst.copy_(src)` with the same threads (more than 100 % is possible, since a "
            "copy also reads the lines that it overwrites):",
            "",
            *kernel_table(kernels),
            "",
            mixed_sentence(kernels),
            "",
            f"**A training step** of a GPT of {fp32['results']['params'] / 1e6:.1f}M params on 2 gloo ranks, fp32 "
            "([bf16, 4 ranks, tiers](stages.md#measured)):",
            "",
            *train_table(fp32),
            "",
            f"Stage 1 over ZeroRedundancyOptimizer in the same rounds: whole step {interval(over['step'])}, optimizer "
            f"part {interval(over['update'])}.",
            "",
            f"**The disk.** A step of {disk['elements'] / 2**20:.0f}M params with master and states in a file moves "
            f"{interval(disk['step GB/s'])} GB/s, {interval(disk['of plain'])} of what plain direct I/O through the "
            f"same memory reaches at its best. Saving a checkpoint of {checkpoint['bytes'] / 1e6:.0f} MB runs at "
            f"{interval(checkpoint['of disk'])} of a plain write of the same bytes; an asynchronous one "
            f"blocks training for {interval(checkpoint['blocking part of a copy'])} of one copy in memory.",
            "",
            "**Host time** of a training step with clipping, of a GPT whose arithmetic is negligible: processor time "
            "of the main thread, what a GPU that is fast enough waits for, measured on an "
            f"{newest('host-1-ranks', XEON)['machine']['device']}:",
            "",
            *host_table(),
            "",
            f"Host time that forward, backward and step of two linears of width 16 take beyond the plain model's: "
            f"{1e6 * hooks['added seconds']['shardopt stage 3']['median']:.0f} us at stage 3, "
            f"{1e6 * hooks['added seconds']['FSDP2, torch fused AdamW']['median']:.0f} us with FSDP2. Laying out "
            f"{layout['results']['params'] / 1e12:.2f}T params over {layout['settings']['ranks']:,} ranks on the meta "
            f"device takes {layout['results']['seconds']:.2f} s and {layout['results']['bytes'] / 2**20:.0f} MiB.",
            "",
            f"`import shardopt` takes {cold['import shardopt']['median']:.2f} s beyond torch, the first step "
            f"{first:.1f} s (compilation), the second {1e3 * second:.1f} ms.",
        ]
    )


def on_a_gpu() -> str:
    """The update on one GPU, what offloading takes there, and a step of one rank."""
    kernels, trained, tests = newest("kernels", GPU), newest("train-bf16*", GPU), newest("gpu-tests", GPU)
    machine, settings, sizes = kernels["machine"], trained["settings"], trained["results"]["params"]
    passed = " and ".join(f"{each['passed']} tests of `{name}`" for name, each in tests["results"].items())
    return "\n".join(
        [
            f"On one {machine['device']}, torch {machine['torch']}, Triton {machine['triton']}: {MEDIANS}. {passed} "
            "passed there.",
            "",
            f"**The update** of {kernels['settings']['elements'] / 2**20:.0f}M elements, the kernel alone, with "
            "launches queued:",
            "",
            *kernel_table(kernels),
            "",
            mixed_sentence(kernels),
            "",
            f"**A step of one rank** of a GPT of {sizes / 1e6:.1f}M params, bf16, {settings['batch']} sequences of "
            f"{settings['context']} tokens; {settings['rounds']} rounds only, in parentheses the least and largest. "
            "At this size the device waits for the host to launch kernels, and this was measured before rounds and "
            "steps were replayed: the host's time above says what is left of it. torch's optimizers have no masters "
            "here:",
            "",
            *train_table(trained),
            "",
            states_on_the_host(newest("offload-moves", GPU)["results"]["moves"], newest("bus", GPU)["results"]["ways"]),
        ]
    )


def states_on_the_host(moves: dict[str, Any], ways: dict[str, Any]) -> str:
    seconds, speeds = moves["s"], moves["GB/s"]
    here, away = (1e3 * seconds[f"step, states {where}"]["median"] for where in ("on the device", "offloaded"))
    gpu, cpu = (percent(ways[f"step='{name}'"]["of"]) for name in ("gpu", "cpu"))
    return (
        f"**States in host memory**, {moves['masters and states GB']:.2f} GB of them: `offload()` moves "
        f"{speeds['offload']['median']:.1f} GB/s, `reload()` {speeds['reload']['median']:.1f}. A step takes {away:.0f} "
        f'ms, and {here:.1f} ms with states on the device. `step="gpu"` reaches {gpu} of plain copies over the bus in '
        f'both directions, `step="cpu"` {cpu} of a copy in host memory.'
    )


def two_hosts() -> str:
    """A step of two hosts that a slow wire joins, beside DDP's and beside the floor."""
    return "\n\n".join(two_hosts_of(newest("network-grid-fp32-2x1", device)) for device in (CPU, XEON))


def two_hosts_of(result: dict[str, Any]) -> str:
    machine, settings, found = result["machine"], result["settings"], result["results"]
    lines = []
    for cell in found["cells"]:
        lines += [
            f"A training step of a GPT of {found['params'] / 1e6:.1f}M params in {settings['dtype']}, of two ranks on "
            f"{machine['device']}, joined by a link of {cell['Gbit/s']:g} Gbit/s and {cell['ms']:g} ms as two hosts "
            f"are; torch {machine['torch']}, gloo: {MEDIANS}. The floor is the larger of the step without any exchange "
            "and the time that the link needs for the bytes of such a step.",
            "",
            "| what | ms | x DDP | x floor | MB that a rank sends |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['title']} | {1e3 * row['step s']['median']:.0f} | {interval(row['x DDP'])} "
            f"| {interval(row['x floor'])} | {row['MB sent']:.0f} |"
            for row in cell["ways"].values()
        ]
    return "\n".join(lines)


def stages() -> str:
    """Every stage and tier that was measured."""
    fp32, bf16, four = newest("train-fp32"), newest("train-bf16"), newest("train-fp32-4-ranks")
    offload, machine = newest("offload")["results"], fp32["machine"]
    return "\n".join(
        [
            f"A training step of a GPT of {fp32['results']['params'] / 1e6:.1f}M params on {machine['device']}, "
            f"torch {machine['torch']}, gloo: {MEDIANS}. Peaks are resident bytes above the process before the "
            "model was built: params, activations and gloo's buffers are in them.",
            "",
            "2 ranks, fp32:",
            "",
            *train_table(fp32),
            "",
            "2 ranks, bf16, where only shardopt and the row of FSDP2 with fp32 params have masters:",
            "",
            *train_table(bf16),
            "",
            "4 ranks of the same machine, fp32:",
            "",
            *train_table(four),
            "",
            "States elsewhere, stage 2, bf16, 2 ranks:",
            "",
            *offload_table(offload),
        ]
    )


def formula(stage: int, **formats: Any) -> str:
    """Bytes a param of AdamW with bf16 params, as the planner counts them."""
    way = Way(stage, True, torch.bfloat16, **formats)
    return plan(transformer(10**6), shardopt.ShardedAdamW([torch.zeros(1)]), 8, way).formula


def bytes_of_formats() -> str:
    """Every master, format of states and stage; gradients in fp32, in bf16 and released."""
    ways: tuple[dict[str, Any], ...] = (
        {"stage": 0},
        {"stage": 2},
        {"stage": 3},
        {"stage": 2, "gradient_format": "bf16"},
        {"stage": 3, "gradient_format": "bf16"},
        {"stage": 1, "release_gradients": True},
    )
    lines = [
        "| `master` | `state_format` | stage 0 | stages 1 and 2 | stage 3 "
        "| stages 1 and 2, bf16 gradients | stage 3, bf16 gradients | stage 1, released gradients |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for master, states in product(get_args(Master), get_args(StateFormat)):
        cells = [formula(**way, master=master, state_format=states) for way in ways]
        lines.append(f"| {master} | {states} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bytes_of_stage_2() -> str:
    """The same in short."""
    states = get_args(StateFormat)
    lines = [f"| bytes a param | {' | '.join(f'states {each}' for each in states)} |", "|---|---|---|---|"]
    for master in get_args(Master):
        cells = [formula(2, master=master, state_format=each) for each in states]
        lines.append(f"| `master={master!r}` | {' | '.join(cells)} |".replace("'", '"'))
    return "\n".join(lines)


def over_fp32(row: dict[str, Any]) -> str:
    interval = "" if row["interval"] is None else f" +- {100 * row['interval']:.2f}"
    return f"{100 * row['over fp32']:+.2f}{interval} %"


def costs_of_formats() -> str:
    """What an update takes, and what a training ends with."""
    formats, quality = newest("formats"), newest("quality")
    losses = {(row["master"], row["states"]): row for row in quality["results"]["rows"]}
    machine = formats["machine"]
    lines = [
        f"One update of {formats['settings']['elements'] / 2**20:.0f}M elements of AdamW, bf16 gradient in and bf16 "
        f"param out, on {machine['device']}: time over that of fp32 masters and states, {MEDIANS}. `kept`: bytes a "
        "param on one rank that was given params only, its own 2 and the gradient's 2 in it. Masters `fp32` that stand "
        "`alone` are not compared with their params: `Tuning(compare_masters=False)`.",
        "",
        how_loss_was_measured(quality),
        "",
        "| `master` | `state_format` | time, x fp32 | kept | loss over fp32 | seed by seed |",
        "|---|---|---|---|---|---|",
    ]
    for row in formats["results"]["rows"]:
        found = losses.get((row["master"], row["states"]))
        mean = by_seed = ""
        if found is not None and found is not losses["fp32", "fp32"]:
            mean = over_fp32(found)
            by_seed = ", ".join(f"{100 * each:+.2f} %" for each in found["by seed"])
        cells = (row["master"], row["states"], interval(row["x fp32"]), f"{row['kept']:.2f}", mean, by_seed)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", how_far_to_believe_it(quality)])


def how_loss_was_measured(quality: dict[str, Any]) -> str:
    settings, rows, chance = quality["settings"], quality["results"]["rows"], quality["results"]["chance"]
    trainings = {row["trainings"] for row in rows[1:-1]}
    count = " to ".join(str(each) for each in sorted({min(trainings), max(trainings)}))
    return (
        f"Loss: the example's GPT in bf16, {settings['steps']} steps of {settings['batch']} sequences, peak learning "
        f"rate {settings['lr']:g} and a cosine to zero; {settings['windows']} held-out sequences. Over fp32 masters "
        f"and states, whose loss is {rows[0]['loss']:.3f} nats a byte: mean of {settings['seeds']} seeds, "
        f"{rows[0]['trainings']} trainings of the yardstick and {count} of each format. "
        "After +-, the 95 % interval that chance leaves: one training has a standard deviation of "
        f"{100 * chance['residual']:.2f} % when seed and format are taken out ({chance['freedom']} degrees of "
        f"freedom), and of {100 * chance['an ulp']:.2f} % "
        "when one element's first value is changed by one ulp and nothing else."
    )


def how_far_to_believe_it(quality: dict[str, Any]) -> str:
    rows = {(row["master"], row["states"]): row for row in quality["results"]["rows"]}
    lossy = rows["torch.optim.AdamW", "bf16"]
    by_seed = ", ".join(f"{100 * each:+.2f} %" for each in lossy["by seed"])
    peaks = [
        f"{float(lr):g} it ends at {sum(losses) / len(losses):.3f}, its trainings "
        f"{100 * (max(losses) / min(losses) - 1):.2f} % apart"
        for lr, losses in quality["results"]["other peaks"].items()
    ]
    return (
        "Two controls. `split` with fp32 states differs from the yardstick in nothing but rounding of ties: "
        f"{over_fp32(rows['split', 'fp32'])}. `torch.optim.AdamW`, bf16 states and no masters: "
        f"{over_fp32(lossy)} ({by_seed}), so a cost is seen where there is one."
        + (f" The yardstick of the first seed at other peaks: at {'; at '.join(peaks)}." if peaks else "")
    )


def curves() -> str:
    """Each optimizer at the best of its rates: loss, steps and time until AdamW's, and what other rates cost."""
    result = newest("curves")
    found, settings = result["results"], result["settings"]
    times, steps = found["times"], settings["steps"]
    lines = [
        f"The example's GPT ({settings['layers']} blocks of width {settings['width']}, {times['params']:,} params), "
        f"{steps} steps of {settings['batch']} sequences of {settings['context']} bytes. Each has the best of "
        f"{settings['rates']} learning rates with the first seed; the table has the means of {settings['seeds']} seeds "
        "at that rate, in parentheses the least and the largest. First params, batches, schedule and clipping are the "
        f"same; there is no weight decay. One thread of {result['machine']['device']}, which other processes used "
        "meanwhile; steps were timed by turns. The loss to be reached is AdamW's, of the last "
        f"{settings['every']} steps.",
        "",
        "| optimizer | best rate | held-out loss, nats a byte | steps to AdamW's loss | a step, x AdamW's "
        "| time to AdamW's loss, x | states, bytes a param |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        of_time, until, ends = times[row["optimizer"]], row["steps to AdamW's loss"], row["held out by seed"]
        step = of_time["step x AdamW"]
        cells = [
            row["optimizer"],
            f"{row['best rate']:g}",
            f"{sum(ends) / len(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})",
            "not reached" if until is None else f"{until:.0f}",
            interval(step),
            "-" if until is None else f"{until / steps * step['median']:.2f}",
            f"{of_time['state bytes a param']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    ranked = sorted(found["rows"], key=lambda row: sum(row["held out by seed"]))
    until = {row["optimizer"]: row["steps to AdamW's loss"] for row in ranked}
    reached = {name: each * times[name]["step x AdamW"]["median"] for name, each in until.items() if each is not None}
    lines += [
        "",
        f"From the least held-out loss to the largest: {', '.join(until)}. AdamW's training loss is reached by "
        f"{min(reached, key=lambda name: until[name])} in the fewest steps, by "
        f"{min(reached, key=lambda name: reached[name])} in the least time.",
    ]
    lines += ["", "The held-out loss of the first seed at each rate, the rate in parentheses:", ""]
    lines.append(f"| optimizer | {' | '.join(f'rate {number + 1}' for number in range(settings['rates']))} |")
    lines.append("|---|" + "---|" * settings["rates"])
    for row in found["rows"]:
        by_rate = [
            f"**{loss:.3f}** ({rate})" if float(rate) == row["best rate"] else f"{loss:.3f} ({rate})"
            for rate, loss in row["held out by rate"].items()
        ]
        lines.append(f"| {row['optimizer']} | {' | '.join(by_rate)} |")
    return "\n".join(lines)


# (page, name between its markers) -> what stands there.
SECTIONS: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "headline"): headline,
    ("docs/measured.md", "peers"): peers,
    ("docs/measured.md", "numbers"): numbers,
    ("docs/measured.md", "gpu"): on_a_gpu,
    ("docs/measured.md", "null"): null_section,
    ("docs/formats.md", "formats"): bytes_of_stage_2,
    ("docs/formats.md", "bytes"): bytes_of_formats,
    ("docs/formats.md", "costs"): costs_of_formats,
    ("docs/stages.md", "measured"): stages,
    ("docs/traffic.md", "network"): two_hosts,
    ("docs/optimizers.md", "curves"): curves,
}


def written(text: str, name: str, section: str) -> str:
    """The page's text with this section in its place."""
    begin, end = f"<!-- {name}: written by bench/readme.py -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"no markers of {name!r} where its numbers should stand: add {begin} and {end}")
    return f"{before}{begin}\n{section}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page is not up to date")
    check = parser.parse_args().check
    differ = False
    for (page, name), section in SECTIONS.items():
        path = ROOT / page
        text = path.read_text()
        wanted = written(text, name, section())
        differ = differ or text != wanted
        if not check:
            path.write_text(wanted)
    return int(check and differ)


if __name__ == "__main__":
    sys.exit(main())
