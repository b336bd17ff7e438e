# Sourced by the recipes: without data there is nothing to train on for hundreds of epochs.
# shellcheck shell=sh

case " $* " in
    *" --data-path "* | *" --data-path="* | *" --help "* | *" -h "*) ;;
    *)
        echo "train: error: no --data-path: name a folder with train/ and val/, such as ImageNet's (all flags: --help)" >&2
        exit 2
        ;;
esac
