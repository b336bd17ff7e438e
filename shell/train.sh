#!/bin/sh
# Trains on one card, or on the CPU where there is none; the first time it sets everything up.
#
#     sh shell/train.sh [flags of `python -m mobilenetv3_paddle.train`]
#     FRAMEWORK=torch sh shell/train.sh ...     the reference instead of the port
#
# Without --data-path it shows on lite_data that it runs. By default a batch has 32 images and the learning rate is
# 0.0125: 0.1 for 256 images, in proportion (arXiv:1706.02677, section 2.1). With another --batch-size give the --lr
# that follows from it.
# CUDA_VISIBLE_DEVICES, which a scheduler sets, is obeyed: its first card, or the CPU where it names none.
# Works from any folder: paths among the flags are relative to where it is called. VENV and PYTHON: see setup.sh.
set -eu

here=$(dirname -- "$0")
# shellcheck source=shell/train_common.sh
. "$here/train_common.sh"

if [ "$cards" -gt 0 ]; then
    device=gpu
else
    device=cpu
    say "$no_card: on the CPU"
fi
exec "$python" -m "$package.train" --device "$device" --lr 0.0125 "$@"
