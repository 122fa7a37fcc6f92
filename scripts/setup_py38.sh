#!/usr/bin/env bash
# Gives a Python 3.8 the oldest numpy and torch that a worker supports, and PyYAML for Isaac Gym's files, in a cached
# environment of its own.
#
# Prints the interpreter's path as the last line of stdout; prints no path and succeeds where there is no Python 3.8.
# CLAW_PYTHON38 names the interpreter to start from, CLAW_PYTHON38_VENV the folder of the environment.
set -euo pipefail
if [ "${1:-}" != "" ]; then
    echo "usage: scripts/setup_py38.sh (no arguments): builds a Python 3.8 with numpy and torch for the tests, 1.7 GB" >&2
    [ "$1" = "--help" ] || [ "$1" = "-h" ]
    exit $?
fi

# A "~" that a shell has left as it is: in quotes, or behind a "=".
home() { case "$1" in "~") echo "$HOME" ;; "~/"*) echo "$HOME/${1#"~/"}" ;; *) echo "$1" ;; esac; }

usual="${XDG_CACHE_HOME:-$HOME/.cache}/claw-lightning/py38" # nobody else's
venv="$(home "${CLAW_PYTHON38_VENV:-$usual}")" venv="${venv%/}"
mark="$venv/.claw-lightning" # by which an environment that this script has built is known again
CLAW_PYTHON38="$(home "${CLAW_PYTHON38:-}")"
ready='import sys, numpy, torch, yaml; assert sys.version_info[:2] == (3, 8)'

is_38() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 8))' 2>/dev/null; }

find_38() {
    local root candidate
    root="${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}"
    for candidate in "${CLAW_PYTHON38:-}" "$root"/versions/3.8.*/bin/python3.8 "$(command -v python3.8 || true)"; do
        if [ -n "$candidate" ] && is_38 "$candidate"; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

if "$venv/bin/python" -c "$ready" 2>/dev/null; then
    echo "$venv/bin/python"
    exit 0
fi
if ! base="$(find_38)"; then
    echo "no Python 3.8 found: set-up of the rollout room's interpreter skipped" >&2
    exit 0
fi
# venv and pip take over whatever environment or folder they are given.
if [ -e "$venv" ] && [ "$venv" != "$usual" ] && [ ! -e "$mark" ] && { [ ! -d "$venv" ] || [ -n "$(ls -A "$venv")" ]; }; then
    echo "setup_py38: $venv holds something that this script has not built, and would be changed; remove it, or set" \
        "CLAW_PYTHON38_VENV to a folder that is new or empty" >&2
    exit 1
fi
echo "building $venv from $base (numpy 1.23.5, torch 1.12.1)" >&2
mkdir -p "$venv"
touch "$mark"
[ -x "$venv/bin/python" ] || "$base" -m venv "$venv" >&2
# torch 1.12.1 is one wheel that carries its CUDA libraries itself: nothing else is pulled in.
"$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
    'numpy==1.23.5' 'torch==1.12.1' 'pyyaml>=6' >&2
"$venv/bin/python" -c "$ready"
echo "$venv/bin/python"
