#!/bin/sh
# Trains MobileNetV3 on ImageNet by a simple recipe: SGD, three decays of the learning rate, crop and flip:
#
#     sh shell/train_simple.sh --data-path IMAGENET [flags of `python -m mobilenetv3_paddle.train`]
#     FRAMEWORK=torch sh shell/train_simple.sh ...      the reference instead of the port
#
# 120 epochs on eight cards with 256 images each. The tutorial that this project succeeds reports for it a top-1 of
# 0.602 in PyTorch and 0.601 in PaddlePaddle (mobilenet_v3_small).
# The learning rate belongs to 8 * 256 images a step: on four cards give --gradient-accumulation-steps 2 or --lr 0.4.
# DEVICES, several nodes, exit status, VENV and PYTHON: see train_dist.sh.
set -eu

here=$(dirname -- "$0")
# shellcheck source=shell/need_data_path.sh
. "$here/need_data_path.sh"
export RECIPE_PROCESSES=8 # of which train_dist.sh speaks where there are not as many
exec sh "$here/train_dist.sh" --model mobilenet_v3_small --epochs 120 --batch-size 256 --opt sgd --lr 0.8 \
    --momentum 0.9 --weight-decay 0.0001 --lr-scheduler steplr --lr-step-size 30 --lr-gamma 0.1 "$@"
