"""Training the drafters that ship with the examples, on a model small enough to train beside."""

from pathlib import Path

import decode
import distill
import evaluate_drafters
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distill import Agreement, Decoder, Recipe, Scaffold, Teacher, Trainer
from draft_models import BlockModel, DraftModel, DraftWeights, build, save_weights
from drafters import ModelDrafter, load_block
from held_out import BEGINNINGS, CHATS
from llama import Batch, Llama, load_llama
from meter import Meter
from prompts import Request
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weights import Checkpoint, open_checkpoint

from dtensor_sample import (
    Drafter,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
)
from tests.pool import Ranks, worlds
from tests.test_examples import save_small

SCAFFOLD = Scaffold(begin=[1, 2, 3], answer=[4, 5], again=[6], end=7, document=8)


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with tied embeddings."""
    path = tmp_path_factory.mktemp("target")
    save_small(path, tied=True, initializer_range=0.16)
    return path


def draft_of(checkpoint: Checkpoint) -> DraftModel:
    torch.manual_seed(3)
    return DraftModel.beside(checkpoint, layers=(0, 2), units=64)


def block_of(checkpoint: Checkpoint) -> BlockModel:
    torch.manual_seed(3)
    return BlockModel.beside(
        checkpoint, layers=(1, 2), units=90, features=(0, 2), K=3, window=6, rank=8
    )


def load(mesh: DeviceMesh, path: Path) -> Llama:
    return load_llama(open_checkpoint(path), mesh, dtype=torch.float32)


def sample(mesh: DeviceMesh, path: Path, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Texts, their temperatures, and what the target makes of the whole texts."""
    target = load(mesh, path)
    texts_ST, temperature_S = distill.sample_texts(
        target, SCAFFOLD, num_texts=24, length=40, seed=seed
    )
    hidden_STH, _ = Teacher(target)(texts_ST.long())
    return texts_ST.cpu(), temperature_S.cpu(), F.linear(hidden_STH, target.lm_head.weight).cpu()


@worlds("cpu:1", "cuda:1")
def test_texts_are_what_the_model_says(ranks: Ranks, small_path: Path) -> None:
    """A mistake in the decode step, in the script of a chat, or in a temperature shows here."""
    ((texts_ST, temperature_S, logits_STV),) = ranks.run(sample, small_path, 1)
    ((again_ST, *_),) = ranks.run(sample, small_path, 1)
    ((other_ST, *_),) = ranks.run(sample, small_path, 2)
    assert torch.equal(texts_ST, again_ST)
    assert not torch.equal(texts_ST, other_ST)
    likeliest_ST = logits_STV.argmax(-1)
    chats = greedy_texts = 0
    for text, likeliest, temperature in zip(
        texts_ST.tolist(), likeliest_ST.tolist(), temperature_S.tolist(), strict=True
    ):
        if text[:3] == SCAFFOLD.begin:
            chats += 1
            where, asking = 3, True
            while where < len(text):
                if asking:
                    ends = [i for i in range(where, len(text)) if text[i] in (7, 8)]
                    if not ends:
                        break
                    passage, asking = SCAFFOLD.answer, False
                else:
                    ends = [i for i in range(where, len(text)) if text[i] in (7, 8)]
                    last = ends[0] if ends else len(text) - 1
                    if temperature == 0:
                        greedy_texts += 1
                        assert text[where : last + 1] == likeliest[where - 1 : last]
                    if not ends:
                        break
                    passage, asking = SCAFFOLD.again, True
                found = text[ends[0] + 1 : ends[0] + 1 + len(passage)]
                assert found == passage[: len(found)]
                where = ends[0] + 1 + len(passage)
        elif temperature == 0:
            greedy_texts += 1
            assert text[24:] == likeliest[23:-1]
    assert 0 < chats < len(texts_ST)
    assert greedy_texts > 0


def test_a_scaffold_is_what_the_chat_template_makes() -> None:
    """The default model's: nothing of a conversation is lost between the passages."""
    checkpoint = open_checkpoint()
    tokenizer, scaffold = checkpoint.tokenizer, Scaffold.of(checkpoint)
    question = tokenizer.encode("Why?")
    assert tokenizer.encode("Why?", chat=True) == [
        *scaffold.begin,
        *question,
        scaffold.end,
        *scaffold.answer,
    ]
    assert scaffold.again == [198, 1, 4093, 198]
    assert {scaffold.end, scaffold.document} == tokenizer.eos_token_ids


def test_the_gradient_is_that_of_the_loss() -> None:
    """Against autograd over the definition in float64, in pieces that do not divide the rows."""
    torch.manual_seed(0)
    hidden_NH, target_NH = torch.randn(2, 7, 5, dtype=torch.float64)
    head_VH, weight_N = torch.randn(11, 5, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    hidden_NH.requires_grad_()
    p_NV, q_NV = (F.softmax(x @ head_VH.T, -1) for x in (target_NH, hidden_NH))
    kl_N, tv_N = (p_NV * (p_NV / q_NV).log()).sum(-1), (p_NV - q_NV).abs().sum(-1) / 2
    expected = ((0.3 * kl_N + 0.6 * tv_N) * weight_N).sum() / weight_N.sum()
    (wanted_NH,) = torch.autograd.grad(expected, hidden_NH)
    loss, overlap_N, same_N = Agreement.apply(hidden_NH, target_NH, head_VH, weight_N, 0.3, 0.6, 3)
    (gradient_NH,) = torch.autograd.grad(2 * loss, hidden_NH)
    torch.testing.assert_close(gradient_NH, 2 * wanted_NH, rtol=1e-5, atol=1e-6)
    assert abs(loss.item() - expected.item()) < 1e-6
    torch.testing.assert_close(overlap_N.double(), 1 - tv_N.detach(), rtol=0, atol=1e-6)
    assert torch.equal(same_N.bool(), p_NV.argmax(-1) == q_NV.argmax(-1))


def test_a_block_sees_what_is_before_it(small_path: Path) -> None:
    """No feature of its own or later positions, none beyond the window, no other block."""
    model = block_of(open_checkpoint(small_path))
    embedded_BTH = torch.randn(1, 20, 48)
    features_BTF = torch.randn(1, 20, 96, requires_grad=True)
    embedded_BTH.requires_grad_()
    anchors_A = torch.tensor([9, 12, 15])
    hidden_BAKH = model(embedded_BTH, features_BTF, anchors_A)
    for a, anchor in enumerate(anchors_A.tolist()):
        for i in range(model.K):
            seen = torch.autograd.grad(
                hidden_BAKH[0, a, i].square().sum(), (features_BTF, embedded_BTH), retain_graph=True
            )
            features, embedded = (x[0].abs().sum(-1).nonzero()[:, 0].tolist() for x in seen)
            assert features == list(range(anchor - 6, anchor))
            assert embedded == [anchor]
        alone_BAKH = model(embedded_BTH, features_BTF, anchors_A[a : a + 1])
        torch.testing.assert_close(alone_BAKH[:, 0], hidden_BAKH[:, a])


def learn(mesh: DeviceMesh, path: Path, kind: str) -> list[list[float]]:
    """The loss of the same texts, over and over, with either optimizer."""
    target, checkpoint = load(mesh, path), open_checkpoint(path)
    texts_ST, _ = distill.sample_texts(target, SCAFFOLD, num_texts=8, length=24, seed=0)
    losses = []
    for muon in (True, False):
        model: DraftModel | BlockModel
        model = draft_of(checkpoint) if kind == "draft" else block_of(checkpoint)
        recipe = Recipe(minutes=1, batch=8, lr=0.002, muon=muon, rows=50)
        trainer = Trainer(model, target, recipe, say=lambda text: None)
        steps = (trainer.step(texts_ST.long(), 0.5) for _ in range(3))
        losses.append([loss.item() for loss, _ in steps])
    return losses


@worlds("cpu:1", "cuda:1")
@pytest.mark.parametrize("kind", ["draft", "block"])
def test_two_steps_lower_the_loss(ranks: Ranks, small_path: Path, kind: str) -> None:
    """Of the texts that they learn from: a loss that does not fall has a gradient that is wrong."""
    (losses,) = ranks.run(learn, small_path, kind)
    for first, _, third in losses:
        assert third < first


def run_trainer(mesh: DeviceMesh, path: Path, folder: Path) -> tuple[list[float], list[str]]:
    """A whole run of a few steps."""
    target, checkpoint = load(mesh, path), open_checkpoint(path)
    told: list[str] = []
    texts_ST, _ = distill.sample_texts(target, SCAFFOLD, num_texts=12, length=24, seed=0)
    texts = texts_ST.cpu().numpy().astype(np.uint16)
    recipe = Recipe(minutes=1, steps=4, batch=4, rows=50)
    trainer = Trainer(block_of(checkpoint), target, recipe, say=told.append)
    losses = trainer.run(texts[:8], texts[8:], folder / "block.safetensors")
    return losses, told


@worlds("cpu:1", "cuda:1")
def test_a_run_leaves_weights(ranks: Ranks, small_path: Path, tmp_path: Path) -> None:
    """What was trained can be read, and is told by position."""
    ((losses, told),) = ranks.run(run_trainer, small_path, tmp_path)
    assert len(losses) == 4
    checkpoint = open_checkpoint(small_path)
    trained = build(DraftWeights(tmp_path / "block.safetensors", checkpoint))
    assert isinstance(trained, BlockModel)
    assert not torch.equal(trained.project.weight, block_of(checkpoint).project.weight)
    assert "tokens a step" in told[-1]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("of", [draft_of, block_of])
def test_files_hold_a_drafter(of: object, small_path: Path, tmp_path: Path) -> None:
    """Rows to half a step of 127 of their largest weight; vectors and settings as they were."""
    checkpoint, path = open_checkpoint(small_path), tmp_path / "drafter.safetensors"
    model = of(checkpoint)  # type: ignore[operator]
    save_weights(path, model)
    again = build(DraftWeights(path, checkpoint))
    assert again.settings() == model.settings()
    for (name, weight), other in zip(
        model.state_dict().items(), again.state_dict().values(), strict=True
    ):
        step = weight.abs().amax(-1, keepdim=True) / 127 if weight.ndim == 2 else weight * 0
        assert ((weight - other).abs() <= 0.501 * step).all(), name
    assert path.stat().st_size < 1.3 * sum(weight.numel() for weight in model.parameters()) + 8000


def test_files_that_are_refused(small_path: Path, tmp_path: Path) -> None:
    """Another file, and one for another target."""
    checkpoint, path = open_checkpoint(small_path), tmp_path / "drafter.safetensors"
    with pytest.raises(ValueError, match=r"model\.safetensors is no file of drafter weights"):
        DraftWeights(small_path / "model.safetensors", checkpoint)
    with pytest.raises(ValueError, match="is no file of drafter weights"):
        DraftWeights(tmp_path / "none.safetensors", checkpoint)
    save_weights(path, draft_of(checkpoint))
    with pytest.raises(ValueError, match="target of vocab_size 1003, got 49152"):
        DraftWeights(path, open_checkpoint())


def run_llama(mesh: DeviceMesh, target_path: Path, path: Path, texts: Tensor) -> Tensor:
    """Hidden states of a draft model as decoding loads it."""
    weights = DraftWeights(path, open_checkpoint(target_path))
    model = load_llama(weights, mesh, dtype=torch.float32)
    hidden_STH, _ = Teacher(model)(texts.to(mesh.device_type))
    return hidden_STH.cpu()


@worlds("cpu:1", "cpu:2", "cpu:4")
def test_a_draft_model_decodes_as_it_was_trained(
    ranks: Ranks, small_path: Path, tmp_path: Path
) -> None:
    """Heads, rotary positions, pruned units, and the target's embedding are the same in both."""
    checkpoint, path = open_checkpoint(small_path), tmp_path / "draft.safetensors"
    save_weights(path, draft_of(checkpoint))
    weights = DraftWeights(path, checkpoint)
    model = build(weights)
    texts_ST = torch.randint(0, 1003, (2, 9), generator=torch.Generator().manual_seed(0))
    embedded_STH = F.embedding(texts_ST, checkpoint.read("model.embed_tokens.weight"))
    assert isinstance(model, DraftModel)
    with torch.no_grad():
        expected_STH = model(embedded_STH)
    for hidden_STH in ranks.run(run_llama, small_path, path, texts_ST):
        torch.testing.assert_close(hidden_STH, expected_STH, rtol=1e-4, atol=1e-4)


def decode_steps(mesh: DeviceMesh, path: Path, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Logits by the step that samples texts, and by the model as decoding runs it."""
    target = load(mesh, path)
    with torch.inference_mode():
        decoder = Decoder(target, num_texts=len(texts), length=texts.shape[1])
        steps = [decoder(texts[:, t], t) for t in range(texts.shape[1])]
    hidden_STH, _ = Teacher(target)(texts)
    return torch.stack(steps, 1), F.linear(hidden_STH, target.lm_head.weight)


@worlds("cpu:1")
def test_the_decode_step_is_the_model(ranks: Ranks, small_path: Path) -> None:
    """Close, as sums may be in another order."""
    texts_ST = torch.randint(0, 1003, (3, 9), generator=torch.Generator().manual_seed(0))
    ((own, expected),) = ranks.run(decode_steps, small_path, texts_ST)
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


def block_hidden(mesh: DeviceMesh, target_path: Path, path: Path, texts: Tensor) -> list[Tensor]:
    """Hidden states of blocks that follow texts of several lengths, as decoding computes them."""
    checkpoint, target = open_checkpoint(target_path), load(mesh, target_path)
    target.allocate_cache(max_num_reqs=3, max_length=20)
    state = SamplingState(mesh, vocab_size=1003, max_num_reqs=3, num_speculative_tokens=3)
    weights = DraftWeights(path, checkpoint)
    drafter = load_block(weights, target, checkpoint, state, max_length=20)
    results = []
    with torch.inference_mode():
        # Slot 2 first has another text, then a shorter one; slot 0 goes on by drafts, of which all
        # but one are refused.
        other, first, second = texts.tolist()
        target(Batch.pack([2], [other], [0], device=mesh.device_type))
        target(Batch.pack([0, 2], [first[:8], second[:4]], [0, 0], device=mesh.device_type))
        target(Batch.pack([0], [[first[8], first[9], 3, 3]], [8], device=mesh.device_type))
        results.append(drafter._hidden([0, 2], [first[:11], second[:5]]))
        results.append(drafter._hidden([2], [second[:5]]))
    return [hidden.cpu() for hidden in results]


@worlds("cpu:1", "cpu:2", "cpu:4", "cuda:1")
def test_a_block_drafter_decodes_as_it_was_trained(
    ranks: Ranks, small_path: Path, tmp_path: Path
) -> None:
    """Its caches hold what training saw at once; refused drafts and texts before leave no trace."""
    checkpoint, path = open_checkpoint(small_path), tmp_path / "block.safetensors"
    save_weights(path, block_of(checkpoint))
    texts_ST = torch.randint(0, 1003, (3, 11), generator=torch.Generator().manual_seed(0))
    expected_SAKH = ranks.run(block_training, small_path, path, texts_ST)[0]
    for both, alone in ranks.run(block_hidden, small_path, path, texts_ST):
        torch.testing.assert_close(both[0], expected_SAKH[1, 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(both[1], expected_SAKH[2, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone[0], expected_SAKH[2, 0], rtol=1e-4, atol=1e-4)


def block_training(mesh: DeviceMesh, target_path: Path, path: Path, texts: Tensor) -> Tensor:
    """Hidden states of the blocks at 4 and 10 as training computes them."""
    checkpoint, target = open_checkpoint(target_path), load(mesh, target_path)
    model = build(DraftWeights(path, checkpoint))
    assert isinstance(model, BlockModel)
    model.to(mesh.device_type)
    texts = texts.to(mesh.device_type)
    _, features_STF = Teacher(target, model.features)(texts)
    embedded_STH = checkpoint.read("model.embed_tokens.weight").to(mesh.device_type)[texts]
    with torch.no_grad():
        hidden_SAKH: Tensor = model(embedded_STH, features_STF, torch.tensor([4, 10]).to(texts))
    return hidden_SAKH.cpu()


def decode_with(
    mesh: DeviceMesh, target_path: Path, folder: Path, temperature: float
) -> dict[str, list[list[int]]]:
    """Texts of decode.py without drafts and with either drafter."""
    checkpoint, results = open_checkpoint(target_path), {}
    for kind in ("", "draft", "block"):
        target = load(mesh, target_path)
        target.allocate_cache(max_num_reqs=2, max_length=40)
        K = 3 if kind else 0
        state = SamplingState(mesh, vocab_size=1003, max_num_reqs=2, num_speculative_tokens=K)
        sampler: Sampler | RejectionSampler = RejectionSampler(state) if kind else Sampler(state)
        drafter: Drafter | None = None
        if kind:
            weights = DraftWeights(folder / f"{kind}.safetensors", checkpoint)
            if kind == "block":
                drafter = load_block(weights, target, checkpoint, state, max_length=40)
            else:
                model = load_llama(weights, mesh, dtype=torch.float32)
                model.allocate_cache(max_num_reqs=2, max_length=40)
                drafter = ModelDrafter(model, state)
        requests = [
            Request(
                index=i,
                prompt="",
                prompt_token_ids=ids,
                params=SamplingParams(temperature=temperature, seed=i),
                stream=checkpoint.tokenizer.stream(),
            )
            for i, ids in enumerate([[3, 4, 5], [1] * 9, [17]])
        ]
        decode.decode(
            target,
            requests,
            sampler,
            drafter=drafter,
            mesh=mesh,
            max_new_tokens=14,
            eos_token_ids=frozenset(),
            meter=Meter(mesh.device_type),
        )
        results[kind] = [request.token_ids for request in requests]
    return results


@pytest.mark.slow
@worlds("cpu:1", "cpu:2", "cpu:4", "cuda:1")
def test_drafters_change_no_greedy_text(ranks: Ranks, small_path: Path, tmp_path: Path) -> None:
    """Greedy texts are those without drafts; random ones are of the same length on all ranks."""
    checkpoint = open_checkpoint(small_path)
    save_weights(tmp_path / "draft.safetensors", draft_of(checkpoint))
    save_weights(tmp_path / "block.safetensors", block_of(checkpoint))
    results = ranks.run(decode_with, small_path, tmp_path, 0.0)
    for texts in results:
        assert texts == results[0]
        assert texts["draft"] == texts["block"] == texts[""]
    results = ranks.run(decode_with, small_path, tmp_path, 1.0)
    for texts in results:
        assert texts == results[0]
        assert all(len(ids) == 14 for ids in texts["block"])


def test_shipped_drafters_are_of_the_default_model() -> None:
    """They open beside it, are of the kinds that they are called by, and are small together."""
    checkpoint = open_checkpoint()
    for kind, path in decode.TRAINED.items():
        weights = decode.open_drafter(kind, None, checkpoint)
        assert isinstance(weights, DraftWeights)
        assert weights.kind == kind
        decode.check_drafter(weights, checkpoint, 600, 4)
        assert path.parent.name == "trained"
        assert (weights.config.num_heads % 4, weights.config.num_kv_heads % 4) == (0, 0)
    sizes = [path.stat().st_size for path in decode.TRAINED.values()]
    assert sum(sizes) <= 16_000_000


def test_drafters_that_are_refused(small_path: Path, tmp_path: Path) -> None:
    """One of the other kind, a block drafter that is none, and more drafts than it has."""
    checkpoint, path = open_checkpoint(small_path), tmp_path / "block.safetensors"
    save_weights(path, block_of(checkpoint))
    with pytest.raises(ValueError, match="is for --speculate block, got draft"):
        decode.open_drafter("draft", path, checkpoint)
    with pytest.raises(ValueError, match=r"block needs a \.safetensors file"):
        decode.open_drafter("block", small_path, checkpoint)
    weights = decode.open_drafter("block", path, checkpoint)
    with pytest.raises(ValueError, match="at most 3 with --speculate block, got 4"):
        decode.check_drafter(weights, checkpoint, 64, 4)


def test_counts_of_an_evaluation_are_written(tmp_path: Path) -> None:
    """A line for each place in a block, and a picture of all."""
    results = [
        {
            "drafter": name,
            "temperature": 0.0,
            "prompts": kind,
            "tokens_per_target_step": 1.5,
            "acceptance_per_position": [0.5, 0.25],
            "drafted_per_position": [8, 8],
            "accepted_per_position": [4, 2],
        }
        for name in ("ngram", "block")
        for kind in evaluate_drafters.KINDS
    ]
    evaluate_drafters.write_csv(tmp_path / "a.csv", results)
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert lines[0].split(",")[-3:] == ["position", "drafted", "accepted"]
    assert lines[1:3] == ["ngram,0.000,chat,1.500,1,8,4", "ngram,0.000,chat,1.500,2,8,2"]
    assert len(lines) == 1 + 2 * len(results)
    evaluate_drafters.draw(tmp_path / "a.png", results)
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert len(set(CHATS)) == len(set(BEGINNINGS)) == 50
