#!/bin/sh
# Runs the tests of the core and of the stores in memory and SQLite on every Python that oncely
# supports and that is on this machine, each in a venv of its own from uv.lock.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "pythons: $*" >&2; }

# pyenv puts a program of this name on the PATH for versions that are not switched on, too.
find_python() {
    for python in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if "$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            command -v "$python"
            return
        fi
    done
    return 1
}

test_on() {
    folder=build/pythons/$1
    UV_PROJECT_ENVIRONMENT=$folder UV_PYTHON_DOWNLOADS=never \
        "$uv" sync --locked --quiet --no-default-groups --group dev --python "$2" &&
        "$folder/bin/pytest" --quiet -p no:cacheprovider tests/unit tests/conformance \
            -n 2 --dist loadscope --no-loadscope-reorder \
            -k "not (postgresql or mysql or mariadb or redis or rabbitmq or pgbouncer or pooled)"
}

uv=$(command -v uv || echo .tools/bin/uv)
failed=
for version in ${ONCELY_TEST_PYTHONS:-3.11 3.12 3.13 3.14}; do
    if python=$(find_python "$version"); then
        say "$version: $python"
        test_on "$version" "$python" || failed="$failed $version"
    else
        say "$version: skipped, it is not on this machine"
    fi
done
[ -z "$failed" ] || say "failed on$failed"
[ -z "$failed" ]
