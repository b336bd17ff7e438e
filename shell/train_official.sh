#!/bin/sh
# Trains MobileNetV3 on ImageNet by torchvision's recipe:
#
#     sh shell/train_official.sh --data-path IMAGENET [flags of `python -m mobilenetv3_paddle.train`]
#     FRAMEWORK=torch sh shell/train_official.sh ...      the reference instead of the port
#
# 600 epochs on eight cards with 128 images each. The recipe ends with the mean of the three best epochs' weights:
#
#     python tools/average_checkpoints.py --framework paddle output/average.pdparams --best 3 output
#     python -m mobilenetv3_paddle.train --test-only --data-path IMAGENET --weights output/average.pdparams
#
# Source: https://github.com/pytorch/vision/pull/3354, which reports Acc@1 67.668 and Acc@5 87.402 for
# mobilenet_v3_small, 74.042 and 91.340 for mobilenet_v3_large (--model mobilenet_v3_large).
# The learning rate belongs to 8 * 128 images a step: on four cards give --gradient-accumulation-steps 2, on one 8.
# DEVICES, several nodes, exit status, VENV and PYTHON: see train_dist.sh.
set -eu

here=$(dirname -- "$0")
# shellcheck source=shell/need_data_path.sh
. "$here/need_data_path.sh"
export RECIPE_PROCESSES=8 # of which train_dist.sh speaks where there are not as many
exec sh "$here/train_dist.sh" --model mobilenet_v3_small --epochs 600 --batch-size 128 --opt rmsprop --lr 0.064 \
    --momentum 0.9 --weight-decay 0.00001 --lr-scheduler steplr --lr-step-size 2 --lr-gamma 0.973 \
    --auto-augment imagenet --random-erase 0.2 "$@"
