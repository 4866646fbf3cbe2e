"""`SharedTextsMixin`: a mixin for Trainer that gives the processes that share texts the same batches."""

from typing import Any

from torch import Tensor, distributed

from hf_efficient_attn.attention.sharded.shards import SequenceShards, shards_of
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.training.callbacks import refuse_label_smoothing

# the ways to choose examples for training that are the same in all processes
ORDERS = ("random", "sequential")
OWN_LOSS = (
    "A compute_loss_func would get the logits of this process's tokens, but the labels of whole texts. Leave it out: "
    "the model returns the loss of the whole texts."
)


class SharedTextsMixin:
    """Mixin for `Trainer` with a model of `shard_sequence`: all processes of the mesh get the same batches.

        class SequenceTrainer(hea.training.SharedTextsMixin, Trainer):
            pass

    Otherwise batches are Trainer's own. The batch size per device becomes the batch size per mesh. The order depends on
    seed and epoch, so resumed training continues with the next examples. Meshes of different processes (data
    parallelism on the other dimension) get different batches. Evaluation returns only the loss, and counts a mesh as
    one process.

    Raises:
        ConfigurationError: evaluation or a `compute_loss_func` needs logits, but every process has only the logits of
            its own tokens; process 0 distributes the examples, or every process selects its own; the ranks of a mesh
            are not consecutive.
        InputError: label smoothing, because Trainer would compute its loss from logits.
    """

    model: Any
    args: Any
    accelerator: Any
    gather_function: Any
    compute_loss_func: Any

    def get_train_dataloader(self) -> Any:
        """Return Trainer's training batches, the same for all processes of a mesh."""
        order = self.args.train_sampling_strategy
        if self._sharing() > 1 and order not in ORDERS:
            raise ConfigurationError(
                f"train_sampling_strategy is {shown(order)}, so every process selects its own examples, but "
                f"processes that share texts need the same ones. It must be one of {', '.join(ORDERS)}."
            )
        return self._shared(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return Trainer's evaluation batches, the same for all processes of a mesh."""
        return self._shared(super().get_eval_dataloader(eval_dataset))  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return Trainer's prediction batches, the same for all processes of a mesh."""
        return self._shared(super().get_test_dataloader(test_dataset))  # type: ignore[misc]

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of examples in a step; all processes of a mesh have the same ones."""
        return super().get_total_train_batch_size(args) // self._sharing()  # type: ignore[misc,no-any-return]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the whole sequences, which the model computes."""
        has_own = self.compute_loss_func is not None
        if (has_own or self.args.label_smoothing_factor) and self._sharing() > 1:
            refuse_label_smoothing(self.args, "the tokens of other processes", own_loss=OWN_LOSS)
            raise ConfigurationError(f"compute_loss_func is {shown(self.compute_loss_func)}. {OWN_LOSS}")
        return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Return Trainer's results, with each mesh counted as one process."""
        if self._sharing() > 1:
            if not (self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only):
                raise ConfigurationError(
                    "Evaluation needs logits, but every process has only the logits of its own tokens. Leave out "
                    "compute_metrics, set prediction_loss_only=True, or predict with a copy that was not sharded."
                )
            # only for this loop, after which Trainer restores its own
            self.gather_function = self._gather_once
        return super().evaluation_loop(dataloader, description, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]

    def _sharing(self) -> int:
        """Return how many processes share a text."""
        shards = shards_within(self.model)
        return 1 if shards is None else shards.size

    def _shared(self, batches: Any) -> Any:
        """Return accelerate's DataLoader, changed to distribute batches among meshes instead of processes."""
        sharing = self._sharing()
        if sharing == 1:
            return batches
        sampler = batches.batch_sampler
        if not hasattr(sampler, "num_processes"):
            raise ConfigurationError(
                f"Process 0 distributes different examples of a {type(batches.dataset).__name__} to each process, but "
                "processes that share texts need the same ones. Give a dataset with a length, leave out "
                "dispatch_batches, or override the method that returns the DataLoader."
            )
        sampler.num_processes = self.args.world_size // sharing
        sampler.process_index = self.args.process_index // sharing
        if sampler.num_processes == 1:
            # a single mesh needs no even batches, for which accelerate would repeat the first examples
            sampler.even_batches = False
        return batches

    def _gather_once(self, tensor: Tensor) -> Tensor:
        """Return the entries of all meshes, one per mesh, without the repeated examples of the last batch."""
        gathered = self.accelerator.gather(tensor)
        once = gathered.unflatten(0, (self.args.world_size, -1))[:: self._sharing()].flatten(0, 1)
        state = self.accelerator.gradient_state
        return once[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else once


def shards_within(model: Any) -> SequenceShards | None:
    """Return the processes that share the texts of a model, which may be wrapped; None: texts are not shared.

    Raises:
        ConfigurationError: the ranks of the processes are not consecutive, or do not start at a multiple of their
            number.
    """
    shards = next((found for each in model.modules() if (found := shards_of(each)) is not None), None)
    if shards is not None:
        ranks = distributed.get_process_group_ranks(shards.group)
        first = ranks[0] // shards.size * shards.size
        if ranks != [*range(first, first + shards.size)]:
            raise ConfigurationError(
                f"The processes that share texts have the ranks {', '.join(map(str, ranks))}, but Trainer needs "
                "consecutive ranks. Put their dimension last in the mesh: init_device_mesh(device, sizes, "
                "mesh_dim_names=('dp', 'sp'))['sp']."
            )
    return shards
