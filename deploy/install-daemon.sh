#!/bin/sh
# Installs the daemon, without torch, into a new virtual environment:
#
#     deploy/install-daemon.sh TARGET [PYTHON]
#
# TARGET must not exist: modules are loaded when they are first used, so an installation is never changed under a
# running daemon. PYTHON is the interpreter to use, python3 if it is not given. Needs a package index.
set -eu

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 TARGET [PYTHON]" >&2
    exit 2
fi
target=$1
python=${2:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)

if [ -e "$target" ]; then
    echo "$0: $target exists; install beside it, then switch over (docs/how_to/daemon.md)" >&2
    exit 2
fi

work=$(mktemp -d)
half_made=$target
trap 'rm -rf "$work" ${half_made:+"$half_made"}' EXIT

# A copy: what former builds left in the tree would end in the wheel, and this build leaves nothing there.
mkdir "$work/tree"
for part in pyproject.toml setup.py README.md LICENSE tierstore hooks daemon; do
    cp -R "$root/$part" "$work/tree"
done

"$python" -m venv "$target"
pip() { "$target/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install --only-binary :all: --constraint "$root/constraints.txt" --requirement "$root/deploy/daemon-requirements.txt"
pip wheel --no-deps --wheel-dir "$work" "$work/tree"
pip install --no-deps --no-index "$work"/tierstore-*.whl # with its dependencies torch would come
half_made=
