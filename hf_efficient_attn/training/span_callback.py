"""A `Trainer` callback for learned attention spans: clamps and logs them, and saves the memory of earlier segments."""

from typing import Any

from torch import nn
from torch.utils.data import RandomSampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.modeling_utils import unwrap_model
from transformers.trainer_callback import ExportableState

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.spans.memory import SegmentMemory
from hf_efficient_attn.models.spans.module import span_modules
from hf_efficient_attn.models.spans.training import average_span, max_span, span_flops
from hf_efficient_attn.training.callbacks import refuse_label_smoothing
from hf_efficient_attn.training.collators import TextSegments
from hf_efficient_attn.training.complete_checkpoints import file_names, read_memory, write_memory


class SpanCallback(TrainerCallback, ExportableState):
    """Clamp the spans after every optimizer step, on every process, and log how far the heads attend.

    An optimizer does not know that a span lies between 0 and the span limit, so the callback clamps spans before
    anything uses the weights again. Every log entry gets `average_span` and `max_span`, in tokens including the ramp,
    and `flops_per_token`, the multiply-adds of one token. Callbacks run in the order of the list. To show the spans in
    TensorBoard or other reports, list their callbacks after this one: `Trainer(args with report_to="none",
    callbacks=[SpanCallback(), TensorBoardCallback()])`.

    With each checkpoint, every process saves its model's memory of earlier segments (`segment_index`), so that training
    resumes in the middle of a text and ends with the same weights as without a break. trainer_state.json lists the
    files of all processes and is written after the file of the first process, so `last_complete_checkpoint` detects
    that a killed process has not written its file.

    Raises:
        CheckpointError: when training resumes, if a process's file is damaged or missing, or that of the first process
            is of another training.
        InputError: at the start of training, if the model has no spans, if label smoothing would drop their penalty, or
            if the rows of a batch of `TextSegments` do not continue those of the previous batch.

    Source: Sukhbaatar et al. (arXiv:1905.07799) and the authors' code, which clamps after every step.
    """

    def __init__(self) -> None:
        self._saving: tuple[TrainingArguments, TrainerState, TrainerControl, SegmentMemory] | None = None
        self._saved_step: int | None = None
        # the step of the last memory that was written, and the hash of its file
        self._written: list[Any] = []

    def state(self) -> dict[str, Any]:
        """Return the entry of this callback in trainer_state.json, after writing the memory if a checkpoint is due."""
        if self._saving is None:
            return {"args": {}, "attributes": {}}
        args, state, control, memory = self._saving
        # Trainer also requests the state when training begins, and after it has failed
        if control.should_save and not memory.is_empty:
            written = write_memory(memory, args, state)
            if written is not None:
                self._written = [state.global_step, written]
                self._saved_step = state.global_step
        # without segments, there is nothing to remember
        files = [] if memory.is_empty else file_names(args)
        return {"args": {}, "attributes": {"memory_files": files, "memory_written": self._written}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = unwrap_model(kwargs["model"])
        if not span_modules(model):
            raise InputError(
                f"{type(model).__name__} has no attention spans. Leave SpanCallback out, or build a model that has "
                "them, such as AdaptiveSpanForCausalLM."
            )
        config: Any = model.config
        if config.span_penalty:
            what = f"the penalty of the spans (span_penalty={config.span_penalty})"
            refuse_label_smoothing(args, what, ", or span_penalty=0.0")
        memory = _memory(model)
        if memory is not None:
            check_rows(kwargs.get("train_dataloader"), args)
            if state.global_step:
                read_memory(memory, args, state)
        self._saving = None if memory is None else (args, state, control, memory)
        # Trainer requires this entry, which older checkpoints do not have
        entries: Any = state.stateful_callbacks
        entries.setdefault(type(self).__name__, self.state())

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for spans in span_modules(kwargs["model"]):
            spans.clamp_()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        memory = _memory(kwargs["model"])
        if memory is not None and not memory.is_empty and self._saved_step != state.global_step:
            write_memory(memory, args, state)
        self._saved_step = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._saving = None

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not span_modules(kwargs["model"]):
            return
        entry = span_log(kwargs["model"])
        # Trainer stores a copy in its history, and passes the original to the following callbacks
        kwargs["logs"].update(entry)
        state.log_history[-1].update(entry)


def check_rows(loader: Any, args: TrainingArguments) -> None:
    """Raise InputError if batches of `TextSegments` do not hold the same rows each time; other datasets are ignored."""
    segments = getattr(loader, "dataset", None)
    if not isinstance(segments, TextSegments):
        return
    accelerator: Any = args.accelerator_config
    num_processes = 1 if accelerator.split_batches else args.world_size
    read_at_once = args.train_batch_size * num_processes
    if segments.num_rows != read_at_once:
        raise InputError(
            f"TextSegments has num_rows={segments.num_rows}, but a batch of all processes has {read_at_once} rows "
            f"({args.train_batch_size} x {num_processes} processes) and would not continue the previous one. Build it "
            f"with num_rows={read_at_once}, or change per_device_train_batch_size."
        )
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if isinstance(getattr(batches, "sampler", None), RandomSampler):
        raise InputError(
            f"train_sampling_strategy={shown(args.train_sampling_strategy)} shuffles segments, but each must continue "
            "the previous one. Set train_sampling_strategy='sequential'."
        )


def _memory(model: nn.Module) -> SegmentMemory | None:
    """Return the model's memory of earlier segments, also if the model is wrapped in an adapter; None: it has none."""
    found = (getattr(module, "memory", None) for module in model.modules())
    return next((memory for memory in found if isinstance(memory, SegmentMemory)), None)


def span_log(model: nn.Module) -> dict[str, float]:
    """Return `average_span` and `max_span` in tokens, and `flops_per_token` in multiply-adds."""
    average = average_span(model)
    return {
        "average_span": average,
        "max_span": max_span(model),
        "flops_per_token": span_flops(unwrap_model(model).config, average),
    }
