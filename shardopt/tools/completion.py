"""``shardopt completion``: what a shell needs to complete command lines, as text for it to read.

Made from the parser, so that it knows every command and option; a shell that reads it starts no Python to complete.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .terminal import Answer

_BASH = """_shardopt() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=""
    if ((COMP_CWORD == 1)); then
        words="{commands}"
        if [[ $current == -* ]]; then words="{top}"; fi
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi
    case "$command $before" in
{values}
    esac
    if [[ -z $words ]]; then
        case "$command $current" in
{flags}
        esac
    fi
    if [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    else
        local IFS=$'\\n'  # names of files may have spaces
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -o filenames -F _shardopt shardopt"""
_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"


@dataclass(frozen=True)
class Option:
    """An option of a command, or its positional argument.

    Attributes:
        flags: none of a positional one.
        values: the words that it takes; none where any text is one.
    """

    flags: tuple[str, ...]
    values: tuple[str, ...]
    help: str


def add_completion(commands: Any, parser: argparse.ArgumentParser) -> None:
    """Adds the command to the subparsers of the command line, the last of all. ``parser``: the command line's own."""
    completion = commands.add_parser(
        "completion",
        help="print what a shell needs to complete command lines",
        description="bash: source <(shardopt completion bash); zsh: the same with zsh; fish: "
        "shardopt completion fish | source. Put that line into ~/.bashrc, ~/.zshrc or ~/.config/fish/config.fish.",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))

    def complete(options: argparse.Namespace) -> Answer:
        known = {name: list(_options_of(each)) for name, each in commands.choices.items()}
        helps = {each.dest: each.help or "" for each in commands._choices_actions}
        top = [each for each in _options_of(parser) if each.flags]
        if options.shell == "fish":
            script = _fish(known, helps, top)
        else:
            script = _ZSH * (options.shell == "zsh") + _bash(known, top)
        return Answer({"shell": options.shell, "script": script}, script)

    completion.set_defaults(run=complete)


def _options_of(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        values = tuple(map(str, action.choices or ()))
        if action.help is not argparse.SUPPRESS:
            yield Option(tuple(action.option_strings), values, (action.help or "").partition(" (default")[0])


def _bash(known: dict[str, list[Option]], top: list[Option]) -> str:
    values, flags = [], []
    for name, options in known.items():
        for each in (each for each in options if each.values):
            patterns = "|".join(f'"{name} {flag}"' for flag in each.flags or (name,))
            values.append(f'        {patterns}) words="{" ".join(each.values)}" ;;')
        flags.append(f'            "{name} -"*) words="{_flags(options)}" ;;')
    return _BASH.format(commands=" ".join(known), top=_flags(top), values="\n".join(values), flags="\n".join(flags))


def _flags(options: list[Option]) -> str:
    return " ".join(flag for each in options for flag in each.flags)


def _fish(known: dict[str, list[Option]], helps: dict[str, str], top: list[Option]) -> str:
    lines = [f"complete -c shardopt -n __fish_use_subcommand{_given(each)} -d {_quoted(each.help)}" for each in top]
    for name, options in known.items():
        lines.append(f"complete -c shardopt -n __fish_use_subcommand -f -a {name} -d {_quoted(helps.get(name, ''))}")
        for each in options:
            words = f" -x -a {_quoted(' '.join(each.values))}" if each.values else ""
            if words or each.flags:
                given = _given(each) + words
                lines.append(
                    f"complete -c shardopt -n '__fish_seen_subcommand_from {name}'{given} -d {_quoted(each.help)}"
                )
    return "\n".join(lines)


def _given(option: Option) -> str:
    """The flags of an option as fish is given them."""
    return "".join(f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}" for flag in option.flags)


def _quoted(text: str) -> str:
    return "'" + text.replace("%%", "%").replace("\\", "\\\\").replace("'", "\\'") + "'"
