"""What the kit writes: records that reprod_log reads, MindSpore's checkpoints; damaged ones are refused."""

import random

import numpy as np
from reprod_log import ReprodDiffHelper

from portproof.io.ckpt import load_ckpt, save_ckpt
from portproof.io.records import save_record
from sturdyio.cli import UserError
from sturdyio.files import load_npy

RECORDED = {
    "logits": np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32),
    "iteration 0/gradient": np.arange(6.0).reshape(2, 3)[:, ::-1],
    "labels": np.arange(3),
    "loss": np.float64(0.5),
    "fortran": np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
    "mask": np.array([True, False]),
    "empty": np.zeros((0, 4), np.float32),
}


def test_a_record_is_what_reprod_log_reads_and_what_is_read_without_it(tmp_path):
    save_record(RECORDED, tmp_path / "ref.npy")
    for read in (ReprodDiffHelper().load_info, load_npy):
        found = read(str(tmp_path / "ref.npy"))
        assert list(found) == list(RECORDED)
        for name, array in RECORDED.items():
            np.testing.assert_array_equal(found[name], np.asarray(array), strict=True)


def test_flipped_bytes_of_a_checkpoint_give_a_result_or_a_refusal(tmp_path):
    path, rng, refused = tmp_path / "weights.ckpt", random.Random(0), 0
    save_ckpt({"weight": np.float32([[1, 2]]), "steps": np.array(3)}, path)
    assert load_ckpt(path).keys() == {"weight", "steps"}
    whole = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        for position in rng.sample(range(len(whole)), rng.randint(1, 3)):
            damaged[position] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            load_ckpt(path)
        except UserError as error:
            assert str(error).isprintable()
            refused += 1
    assert refused > 30
