"""Which checkpoints are complete: every file missing or truncated; FSDP, DeepSpeed and PEFT."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from training.span_runs import SEGMENT, build_model, build_trainer, text

import hf_efficient_attn as hea
from hf_efficient_attn.training.complete_checkpoints import why_incomplete

STEPS = 3


def train(folder: Path, **changes: Any) -> None:
    optimizer = torch.optim.Adagrad(hea.optimizer_groups(model := build_model(), 0.0), lr=0.07)
    segments = hea.TextSegments(text(2 * (STEPS * SEGMENT + 1)), 2, SEGMENT)
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": STEPS, **changes}
    build_trainer(folder, model, segments, optimizer, [hea.SpanCallback()], **saving).train()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


NEEDED = (
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "segment_memory_0.pt",
    "trainer_state.json",
)


@pytest.mark.parametrize("name", NEEDED)
def test_every_file_counts_and_counts_whole(run: Path, name: str) -> None:
    newest = run / f"checkpoint-{STEPS}"
    assert hea.last_complete_checkpoint(run) == str(newest)
    file, before = newest / name, str(run / f"checkpoint-{STEPS - 1}")
    content = file.read_bytes()
    for length in (0, 1, 9, len(content) // 2, len(content) - 2):
        file.write_bytes(content[:length])
        assert hea.last_complete_checkpoint(run) == before, length
        assert why_incomplete(newest).startswith(name)
    file.unlink()
    assert hea.last_complete_checkpoint(run) == before
    assert why_incomplete(newest) == f"{name} is missing{' or truncated' if name == NEEDED[-1] else ''}."


def test_without_any(tmp_path: Path) -> None:
    assert hea.last_complete_checkpoint(tmp_path / "none") is None
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-9").write_text("a file")
    assert hea.last_complete_checkpoint(tmp_path) is None


def test_numbers_are_compared_as_numbers(run: Path) -> None:
    shutil.copytree(run / "checkpoint-3", run / "checkpoint-10")
    assert hea.last_complete_checkpoint(str(run)) == str(run / "checkpoint-10")


def test_save_only_model(tmp_path: Path) -> None:
    train(tmp_path, save_only_model=True)
    assert hea.last_complete_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{STEPS}")


def test_shards(run: Path) -> None:
    newest = run / f"checkpoint-{STEPS}"
    (newest / "model.safetensors").unlink()
    build_model().save_pretrained(newest, max_shard_size="4kB")
    assert why_incomplete(newest) is None
    shards = sorted(newest.glob("model-*.safetensors"))
    assert len(shards) > 2
    content = shards[1].read_bytes()
    shards[1].write_bytes(shards[0].read_bytes())
    assert "lacks tensors that model.safetensors.index.json lists" in why_incomplete(newest)
    shards[1].write_bytes(content[:-1])
    assert why_incomplete(newest).startswith(f"{shards[1].name} is truncated")
    shards[1].unlink()
    assert why_incomplete(newest) == f"{shards[1].name} is missing."


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("names", [("default",), ("first", "second")])
def test_adapters(run: Path, names: tuple[str, ...]) -> None:
    newest = run / f"checkpoint-{STEPS}"
    (newest / "model.safetensors").unlink()
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    model = peft.get_peft_model(build_model(), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    model.save_pretrained(newest)
    assert why_incomplete(newest) is None
    file = next(newest.rglob("adapter_model.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert str(file.relative_to(newest)) in why_incomplete(newest)


def test_fsdp_in_shards(run: Path) -> None:
    newest = run / f"checkpoint-{STEPS}"
    for old, new in {"model.safetensors": "pytorch_model_fsdp_0", "optimizer.pt": "optimizer_0"}.items():
        (newest / old).unlink()
        (newest / new).mkdir()
        (newest / new / "__0_0.distcp").write_bytes(b"numbers")
        assert why_incomplete(newest) == f"{new}/.metadata is missing."
        (newest / new / ".metadata").write_bytes(b"end")
        if old == "model.safetensors":
            assert why_incomplete(newest) is None
    assert why_incomplete(newest) is None


def test_deepspeed(run: Path) -> None:
    newest = run / f"checkpoint-{STEPS}"
    for old in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        (newest / old).unlink()
    folder = newest / "global_step3"
    folder.mkdir()
    assert why_incomplete(newest) == "latest is missing or truncated."
    (newest / "latest").write_text("global_step3")
    assert why_incomplete(newest) == "global_step3/*_states.pt is missing."
    states = folder / "mp_rank_00_model_states.pt"
    torch.save({}, states)
    assert why_incomplete(newest) is None
    states.write_bytes(states.read_bytes()[:-5])
    assert why_incomplete(newest) == "global_step3/mp_rank_00_model_states.pt is truncated."


def split(checkpoint: Path, processes: int, arguments: int | None = None, **flags: Any) -> None:
    """Make a checkpoint of one process look like that of several; `arguments`: as many as its arguments count."""
    for process in range(processes):
        for name in ("rng_state", "segment_memory"):
            source = checkpoint / {"rng_state": "rng_state.pth", "segment_memory": "segment_memory_0.pt"}[name]
            copy = checkpoint / f"{name}_{process}{source.suffix}"
            if copy != source:
                shutil.copy(source, copy)
    (checkpoint / "rng_state.pth").unlink()
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    attributes = state["stateful_callbacks"]["SpanCallback"]["attributes"]
    attributes["memory_files"] = [f"segment_memory_{process}.pt" for process in range(processes)]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    file = checkpoint / "training_args.bin"
    saved = torch.load(file, weights_only=False)
    saved.distributed_state = None if arguments is None else SimpleNamespace(num_processes=arguments)
    vars(saved).update(flags)
    torch.save(saved, file)


@pytest.mark.parametrize("counted", [True, False])
def test_every_process_counts(run: Path, counted: bool) -> None:
    """The last one too, where the arguments count them; `processes/test_trainer.py` has a real checkpoint of two."""
    newest = run / f"checkpoint-{STEPS}"
    split(newest, 3, 3 if counted else None)
    assert why_incomplete(newest) is None
    for process in (1, 2) if counted else (1,):
        for name in (f"rng_state_{process}.pth", f"segment_memory_{process}.pt"):
            (newest / name).rename(newest / "elsewhere")
            assert why_incomplete(newest) == f"{name} is missing."
            (newest / "elsewhere").rename(newest / name)
    for process in range(3):
        (newest / f"rng_state_{process}.pth").unlink()
    assert why_incomplete(newest) == f"rng_state{'_0' if counted else ''}.pth is missing."


def test_shards_count_processes_where_nothing_else_does(run: Path) -> None:
    newest = run / f"checkpoint-{STEPS}"
    split(newest, 3)
    (newest / "rng_state_2.pth").unlink()
    (newest / "training_args.bin").unlink()
    shards = newest / "pytorch_model_fsdp_0"
    shards.mkdir()
    for name in ("__0_0.distcp", "__2_0.distcp", ".metadata"):
        (shards / name).write_bytes(b"numbers")
    assert why_incomplete(newest) == "rng_state_2.pth is missing."


def test_a_folder_of_one_node_has_the_files_of_its_processes(run: Path) -> None:
    newest = run / f"checkpoint-{STEPS}"
    split(newest, 4, 4, save_on_each_node=True)
    for process in (0, 1):
        (newest / f"rng_state_{process}.pth").unlink()
        (newest / f"segment_memory_{process}.pt").unlink()
    assert why_incomplete(newest) is None
    (newest / "segment_memory_3.pt").unlink()
    assert why_incomplete(newest) == "segment_memory_3.pt is missing."


def test_the_memory_is_there_before_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is what makes a checkpoint look complete."""
    seen = []
    save = transformers.TrainerState.save_to_json

    def look_and_save(self: Any, path: str) -> None:
        seen.append((Path(path).parent / "segment_memory_0.pt").is_file())
        save(self, path)

    monkeypatch.setattr(transformers.TrainerState, "save_to_json", look_and_save)
    train(tmp_path)
    assert seen[:STEPS] == [True] * STEPS
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("content", [None, b"", b"half", "other"])
def test_a_memory_that_cannot_be_read_names_the_checkpoint_before(run: Path, content: Any) -> None:
    file = run / f"checkpoint-{STEPS}" / "segment_memory_0.pt"
    before = run / f"checkpoint-{STEPS - 1}"
    if content is None:
        file.unlink()
    elif content == "other":
        torch.save({"other": 1}, file)
    else:
        file.write_bytes(content)
    optimizer = torch.optim.Adagrad(hea.optimizer_groups(model := build_model(), 0.0), lr=0.07)
    segments = hea.TextSegments(text(2 * (STEPS * SEGMENT + 1)), 2, SEGMENT)
    trainer = build_trainer(run, model, segments, optimizer, [hea.SpanCallback()], max_steps=STEPS + 2)
    with pytest.raises(
        hea.CheckpointError, match=r"segment_memory_0\.pt.*last complete checkpoint before this one, .*: "
    ) as error:
        trainer.train(resume_from_checkpoint=str(file.parent))
    assert before.name in str(error.value)
