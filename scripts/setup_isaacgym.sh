#!/usr/bin/env bash
# Builds the Python 3.8 environment in which workers run Isaac Gym, from NVIDIA's download of it.
#
# Downloads torch and a few small packages; takes some minutes and about 6 GB. The last line of stdout is the setting
# that a configuration needs. Variables:
#   CLAW_PYTHON38            interpreter to start from (a shared build of Python 3.8); looked for if not given
#   CLAW_ISAACGYM_TORCH      pip arguments for torch (default: torch==1.13.1+cu117 from PyTorch's own index)
#   CLAW_ISAACGYMENVS        folder of a clone of IsaacGymEnvs (tag release/1.5.1); a line about it is printed if not given
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/setup_isaacgym.sh [--check] DOWNLOAD_FOLDER [VENV]

  DOWNLOAD_FOLDER  the unpacked Isaac Gym Preview 4, that is the folder "isaacgym" with python/ in it
  VENV             where to build the environment (default: ~/.cache/claw-lightning/isaacgym)
  --check          look at everything that is needed, change nothing
TEXT
}

fail() { echo "setup_isaacgym: $*" >&2; exit 1; }

check_only=""
arguments=()
for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit 0 ;;
        --check) check_only=1 ;;
        -*) usage >&2; fail "unknown option $argument" ;;
        *) arguments+=("$argument") ;;
    esac
done
if [ "${#arguments[@]}" -lt 1 ] || [ "${#arguments[@]}" -gt 2 ]; then usage >&2; exit 2; fi

# A "~" that a shell has left as it is: in quotes, or behind a "=".
home() { case "$1" in "~") echo "$HOME" ;; "~/"*) echo "$HOME/${1#"~/"}" ;; *) echo "$1" ;; esac; }

download="$(home "${arguments[0]}")" download="${download%/}"
usual="${XDG_CACHE_HOME:-$HOME/.cache}/claw-lightning/isaacgym" # nobody else's
venv="$(home "${arguments[1]:-$usual}")" venv="${venv%/}"
mark="$venv/.claw-lightning" # by which an environment that this script has built is known again
CLAW_PYTHON38="$(home "${CLAW_PYTHON38:-}")"
torch="${CLAW_ISAACGYM_TORCH:-torch==1.13.1+cu117 --extra-index-url https://download.pytorch.org/whl/cu117}"

# -- the download ------------------------------------------------------------------------------------------------------

[ -d "$download" ] || fail "$download is no folder; unpack IsaacGym_Preview_4_Package.tar.gz and give its folder isaacgym"
if [ ! -d "$download/python" ] && [ -d "$download/isaacgym/python" ]; then download="$download/isaacgym"; fi
[ -f "$download/python/setup.py" ] || fail "$download has no python/setup.py; give the folder isaacgym of the download"
[ -f "$download/python/isaacgym/gymapi.py" ] || fail "$download/python/isaacgym/gymapi.py is missing; unpack it again"
bindings="$download/python/isaacgym/_bindings/linux-x86_64"
[ -f "$bindings/gym_38.so" ] || fail "$bindings has no gym_38.so: not Preview 4, or unpacked in part; unpack it again"
source_file="$download/python/isaacgym/_bindings/src/gymtorch/gymtorch.cpp"
[ -f "$source_file" ] || fail "$source_file is missing: gymtorch could not be compiled; unpack the download again"

# -- the interpreter ---------------------------------------------------------------------------------------------------

is_38() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 8))' 2>/dev/null; }
is_shared() { "$1" -c 'import sys, sysconfig; sys.exit(not sysconfig.get_config_var("Py_ENABLE_SHARED"))' 2>/dev/null; }

candidates() {
    local root
    root="${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}"
    ls -d "$root"/versions/3.8.*/bin/python3.8 2>/dev/null || true
    command -v python3.8 || true
}

base="" unshared=""
if [ -n "${CLAW_PYTHON38:-}" ]; then
    is_38 "$CLAW_PYTHON38" || fail "CLAW_PYTHON38: $CLAW_PYTHON38 is no Python 3.8; Isaac Gym has bindings for 3.6 to 3.8"
    if is_shared "$CLAW_PYTHON38"; then base="$CLAW_PYTHON38"; else unshared="$CLAW_PYTHON38"; fi
else
    for candidate in $(candidates); do
        is_38 "$candidate" || continue
        if is_shared "$candidate"; then base="$candidate"; break; else unshared="$candidate"; fi
    done
fi
if [ -z "$base" ] && [ -n "$unshared" ]; then
    fail "$unshared was built without a shared library, which Isaac Gym loads; build one that has it:" \
        "PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force 3.8.18"
fi
[ -n "$base" ] || fail "no Python 3.8 found; PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install 3.8.18, or set CLAW_PYTHON38"
command -v "${CXX:-c++}" >/dev/null || fail "no C++ compiler (c++), with which gymtorch is compiled: apt-get install g++"

envs="$(home "${CLAW_ISAACGYMENVS:-}")"
if [ -n "$envs" ]; then
    [ -f "$envs/isaacgymenvs/cfg/task/ShadowHand.yaml" ] ||
        fail "CLAW_ISAACGYMENVS: $envs has no isaacgymenvs/cfg/task/ShadowHand.yaml; give the folder of a clone of IsaacGymEnvs"
fi

# Looked at before anything is written: venv takes over whatever environment or folder it is given.
if [ -e "$venv" ] && [ ! -d "$venv" ]; then fail "$venv is no folder; give another VENV"; fi
if [ -d "$venv" ] && [ "$venv" != "$usual" ] && [ ! -e "$mark" ] && [ -n "$(ls -A "$venv")" ]; then
    fail "$venv holds something that this script has not built, and would be changed; give a VENV that is new or empty"
fi

echo "Isaac Gym: $download" >&2
echo "Python 3.8: $base" >&2
echo "environment: $venv ($torch)" >&2
[ -z "$check_only" ] || { echo "all that is needed is there; nothing was changed" >&2; exit 0; }

# -- the environment ---------------------------------------------------------------------------------------------------

mkdir -p "$venv"
touch "$mark"
"$base" -m venv "$venv" >&2
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" >&2; }
# shellcheck disable=SC2086  # several arguments on purpose
pip install --progress-bar off 'numpy==1.23.5' $torch
# setuptools 65 still builds gym 0.23.1; jinja2 is for AllegroKuka.
pip install --progress-bar off 'setuptools==65.5.0' 'wheel<0.40' 'gym==0.23.1' ninja 'pyyaml>=5.4' jinja2
# Without dependencies: it asks for torchvision and others that no task needs.
pip install --no-deps --no-build-isolation -e "$download/python"
[ -z "$envs" ] || pip install --no-deps --no-build-isolation -e "$envs"
libraries="$("$base" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')"
LD_LIBRARY_PATH="$libraries:$bindings:${LD_LIBRARY_PATH:-}" "$venv/bin/python" -c 'import numpy, isaacgym, torch' >&2 ||
    fail "the environment is built, but Isaac Gym cannot be imported in it; see the lines above and docs/isaac_gym.md"
if [ -z "$envs" ]; then
    echo "task files: git clone --branch release/1.5.1 https://github.com/isaac-sim/IsaacGymEnvs, then give the folder" >&2
    echo "as data.env.init_args.isaacgymenvs_path" >&2
fi
echo "data.worker_python: $venv/bin/python"
