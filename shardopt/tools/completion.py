"""``shardopt completion``: prints the script by which a shell completes command lines.

The script is made from the parser, so it has every command and option; completing with it starts no Python.
"""

import argparse
from typing import Any

from .terminal import CommandResult

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


def add_completion(commands: Any, parser: argparse.ArgumentParser) -> None:
    """Adds the command to the subparsers of the command line, the last of all. ``parser``: the command line's own."""
    completion = commands.add_parser(
        "completion",
        help="print what a shell needs to complete command lines",
        description="bash: source <(shardopt completion bash); zsh: the same with zsh; fish: "
        "shardopt completion fish | source. Put that line into ~/.bashrc, ~/.zshrc or ~/.config/fish/config.fish.",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))

    def complete(options: argparse.Namespace) -> CommandResult:
        known = {name: _options_of(each) for name, each in commands.choices.items()}
        helps = {each.dest: each.help or "" for each in commands._choices_actions}
        top = [each for each in _options_of(parser) if each.option_strings]
        if options.shell == "fish":
            script = _fish(known, helps, top)
        else:
            script = _ZSH * (options.shell == "zsh") + _bash(known, top)
        return CommandResult({"shell": options.shell, "script": script}, script)

    completion.set_defaults(run=complete)


def _options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Returns the options of a command, and its positional arguments, which have no flags."""
    return [action for action in parser._actions if action.help is not argparse.SUPPRESS]


def _words(action: argparse.Action) -> str:
    """Returns the words that an option takes; empty if it takes any text."""
    return " ".join(map(str, action.choices or ()))


def _help(action: argparse.Action) -> str:
    return _quoted((action.help or "").partition(" (default")[0])


def _bash(known: dict[str, list[argparse.Action]], top: list[argparse.Action]) -> str:
    values, flags = [], []
    for name, options in known.items():
        for each in filter(_words, options):
            patterns = "|".join(f'"{name} {flag}"' for flag in each.option_strings or (name,))
            values.append(f'        {patterns}) words="{_words(each)}" ;;')
        flags.append(f'            "{name} -"*) words="{_flags(options)}" ;;')
    return _BASH.format(commands=" ".join(known), top=_flags(top), values="\n".join(values), flags="\n".join(flags))


def _flags(options: list[argparse.Action]) -> str:
    return " ".join(flag for each in options for flag in each.option_strings)


def _fish(known: dict[str, list[argparse.Action]], helps: dict[str, str], top: list[argparse.Action]) -> str:
    lines = [f"complete -c shardopt -n __fish_use_subcommand{_given(each)} -d {_help(each)}" for each in top]
    for name, options in known.items():
        lines.append(f"complete -c shardopt -n __fish_use_subcommand -f -a {name} -d {_quoted(helps.get(name, ''))}")
        for each in options:
            given = _given(each) + (f" -x -a {_quoted(_words(each))}" if each.choices else "")
            if given:
                lines.append(f"complete -c shardopt -n '__fish_seen_subcommand_from {name}'{given} -d {_help(each)}")
    return "\n".join(lines)


def _given(option: argparse.Action) -> str:
    """Returns the flags of an option, as fish takes them."""
    return "".join(f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}" for flag in option.option_strings)


def _quoted(text: str) -> str:
    return "'" + text.replace("%%", "%").replace("\\", "\\\\").replace("'", "\\'") + "'"
