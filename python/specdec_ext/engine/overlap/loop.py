"""The engine loop over steps that are enqueued before earlier ones were read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import EngineError
from ...log import logger
from ..loop import EngineLoop
from . import OverlapPipeline

if TYPE_CHECKING:
    import torch

__all__ = ["OverlapLoop"]


class OverlapLoop(EngineLoop):
    """Drives a OverlapPipeline; what it delivers goes the way of any step's outputs.

    A stop string is found when a step is read: what steps in flight bring after it is dropped.
    """

    def __init__(self, pipeline: OverlapPipeline, model: Any, **options: Any) -> None:
        super().__init__(pipeline.executor, model, **options)
        self._pipeline = pipeline
        pipeline.process = self._process
        pipeline.draft_options = self._draft_options

    def _advance(self, resumed: bool) -> list[Any] | None:
        """Enqueue a step for whoever is ready and read the one that is due. None: neither."""
        if self._drafting is not None and not resumed:
            self._drafting.propose()
        self._grammars.force()
        before = self._pipeline.forward_s
        try:
            outputs = self._pipeline.step()
        except EngineError as error:  # a rank is lost: no step can run
            self._stop_all(str(error))
            raise
        except Exception as error:
            self._stop_for(error)
            return None
        self._forward_s += self._pipeline.forward_s - before
        return outputs

    def _recover(self) -> None:
        self._pipeline.recover()

    def _after_step(self) -> None:
        if self.executor.num_unfinished == 0:
            self._pipeline.drain()  # nobody waits for these steps, but for their pages

    def _process(self, step: int, scores: torch.Tensor) -> Any:
        if self._wants_logits:
            self._results[step] = scores.clone()
        trees = self.executor.choice_trees()
        self._grammars.mask(trees, scores, drawn=True)
        masks, failed = self._grammars.masks, self._grammars.errors
        changed = [tree for tree in trees if tree.processed]
        if not changed:
            return None, failed, masks
        processed, errors = self._process_trees(changed, scores)
        return processed, {**failed, **errors}, masks

    def _draft_options(self, request_id: int) -> Mapping[str, Any]:
        with self._lock:
            state = self._states.get(request_id)
        return {} if state is None else state.draft_options

    def _calibrate_once(self) -> None:
        ready = self._calibrate is not None and self._wants_calibration
        if not ready or self.executor.stats()["running"]:
            return
        self._pipeline.drain()  # of requests that have ended: no step may write pages meanwhile
        # Passes are timed on a stream of their own, in the buffers of the steps: a recorded one
        # that was tried when the engine was built may still run.
        self._pipeline.stream.record().wait()
        super()._calibrate_once()
        self._pipeline.stream.follow()
        self._pipeline.measure_drafting()

    def time_steps(self) -> None:
        """Take the time of the steps' parts from now on, from zero (docs/overlap.md)."""
        with self._steps.lock:
            self._pipeline.time_steps()

    def get_metrics(self) -> dict[str, Any]:
        pipeline = self._pipeline
        times = pipeline.times
        about = {
            "depth": pipeline.executor.overlap_depth,
            "num_graphs": pipeline.num_graphs,
            "graph_bytes": pipeline.graph_bytes,
            "step_times": None if times is None else times.to_dict(),
        }
        drafter = pipeline.drafter
        stats = super().get_metrics()
        if drafter is not None:
            seconds = pipeline.drafting_s if pipeline.stream.immediate else None
            stats["drafter"] = {
                "name": drafter.name,
                "seconds": seconds,
                "failures": pipeline.draft_failures,
                **drafter.stats(),
            }
        return {**stats, "overlap": about}

    def close(self) -> None:
        super().close()
        with self._steps.lock:
            try:
                self._pipeline.recover()
                self._pipeline.drain()
            except EngineError:
                return  # a rank is lost, which was said
            except Exception as error:  # the device is gone; nobody waits any more
                logger.error("steps in flight could not be read: %s", error)
