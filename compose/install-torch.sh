#!/bin/sh
# install-torch.sh FOLDER: torch $TORCH+$TORCH_BUILD, by the hashes beside it where it has some.
set -eu
pins=$(dirname "$0")/requirements-torch.txt
wanted="torch==$TORCH+$TORCH_BUILD"
index=${TORCH_INDEX_URL:+--extra-index-url=$TORCH_INDEX_URL}
if [ "$(uname -m)" = x86_64 ] && grep -qF "$wanted " "$pins"; then
    if pip install --target "$1" $index --no-deps --require-hashes -r "$pins" 2>/tmp/log; then
        exit
    fi
    cat /tmp/log >&2
    # Another file of that name is not to be had another way.
    if grep -q 'DO NOT MATCH THE HASHES' /tmp/log; then
        exit 1
    fi
elif pip install --target "$1" $index "$wanted"; then
    echo "$wanted has no hash here: it is taken as it came" >&2
    exit
fi
echo "no $wanted at this index (see TORCH_INDEX_URL): takes torch $TORCH as it is, without a hash" >&2
pip install --target "$1" "torch==$TORCH"
