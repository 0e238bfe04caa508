"""The whole loop against transformers + AdamW: first loss, first gradients, twenty losses."""

import json
import os
import pathlib
import subprocess

import pytest
import torch

import reference

PROBE = pathlib.Path(os.environ["SLIDEDP_BUILD_DIR"]) / "tests" / "loop_probe"
LR, STEPS = 1e-4, 20


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    reference.tiny_checkpoint(request.param, folder / "model")
    batch = reference.packed_rows(131, str(folder / "packed.safetensors"))
    return folder, batch


def probe(folder, *arguments):
    command = [PROBE, "--model", folder / "model", "--data", folder / "packed.safetensors", "--seq", reference.SEQ,
               "--rows", reference.ROWS, "--steps", STEPS, "--lr", LR, *arguments]
    done = subprocess.run([str(a) for a in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# fp32 sums of a few hundred terms err by about 1e-7 of their size.
def assert_losses(got, want, tolerance=1e-5):
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    assert got == pytest.approx(want, rel=tolerance)


@pytest.mark.parametrize("ranks,micro_batches,route", [
    (1, 1, ("replicated", "cpu")), (2, 1, ("sharded", "gpu")), (2, 2, ("replicated", "cpu")), (4, 1, ("sharded", "cpu"))])
def test_fp32_wire(case, ranks, micro_batches, route):
    folder, batch = case
    want = reference.train(folder / "model", batch, STEPS, LR)
    got = probe(folder, "--ranks", ranks, "--micro-batches", micro_batches, "--delivery", route[0], "--reduction",
                route[1], "--gradients", folder / "gradients.safetensors")
    assert want["losses"][-1] < 0.95 * want["losses"][0]  # the optimizer's part counts
    assert_losses(got["losses"], want["losses"])
    assert got["norms"] == pytest.approx(want["norms"], rel=1e-4)
    found = reference.gradients(folder / "gradients.safetensors")
    assert found.keys() == want["gradients"].keys()
    for name, gradient in want["gradients"].items():
        assert relative(found[name], gradient) < 1e-5, name


def test_clipping_and_weight_decay(case):
    folder, batch = case
    want = reference.train(folder / "model", batch, STEPS, LR, weight_decay=0.5, max_grad_norm=0.5)
    assert min(want["norms"]) > 0.5  # every step is clipped
    got = probe(folder, "--ranks", 2, "--update", "deferred", "--weight-decay", 0.5, "--max-grad-norm", 0.5)
    assert_losses(got["losses"], want["losses"])


def test_bf16_wire(case):
    """Rounding a gradient to bf16 changes it by at most 2^-9 of itself. Adam's step m / sqrt(v) then changes by at most
    twice that, since m and v move by the same share, so a weight is off by at most lr * 2^-8 a step, and the loss, to
    first order, by sum |gradient| times that. Two sources (ranks) round twice, and an error that pushes a weight over
    a bf16 rounding boundary changes it by one bf16 step, as likely as it is small: a factor of 4 in all.
    """
    folder, batch = case
    want = reference.train(folder / "model", batch, STEPS, LR)
    got = probe(folder, "--ranks", 2, "--wire", "bf16")
    assert got["losses"][0] == pytest.approx(want["losses"][0], rel=1e-6)
    bound = 0.0
    for step in range(1, STEPS):
        bound += 4 * LR * 2.0**-8 * want["sums"][step - 1]
        assert abs(got["losses"][step] - want["losses"][step]) <= bound + 1e-5 * want["losses"][step], step
    assert got["losses"] != pytest.approx(want["losses"], rel=1e-9)  # bf16 was really on the wire


def test_reference_isolates_documents(case):
    """Other tokens in a row's first document leave the second document's logits as they were."""
    folder, batch = case
    model = reference.load(folder / "model").eval()
    changed = {k: v.clone() for k, v in batch.items()}
    changed["input_ids"][0, :9] = (changed["input_ids"][0, :9] + 1) % 131
    with torch.no_grad():
        a, b = (model(input_ids=x["input_ids"], position_ids=x["position_ids"], use_cache=False,
                      attention_mask=reference.document_mask(x["position_ids"])).logits for x in (batch, changed))
    assert torch.equal(a[0, 9:20], b[0, 9:20])
    assert not torch.equal(a[0, :9], b[0, :9])
