"""The weight-update session: init, start, update, finish, in this order.

New weights are read into a second copy of the model while generation goes on with the first; finishing
exchanges the two between steps. So a hand-off that is torn, missing or of another shape changes nothing, and
the engine stands still only for the exchange.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

from hpcrl.errors import HandoffError
from hpcrl.inference.loading import check_fits, read_tensors
from hpcrl.trainer.models.hf import load_hf_tensors
from hpcrl.trainer.models.qwen3_moe import Qwen3Moe
from hpcrl.weights import Handoff

__all__ = ["UpdateOrderError", "WeightUpdater"]


class UpdateOrderError(Exception):
    """A call of the update session came out of order; nothing was changed."""


class WeightUpdater:
    """State of the update session. Calls may come from any thread; one runs at a time."""

    def __init__(self, model: Qwen3Moe, *, root: Path | None, verify_content: bool) -> None:
        """Start without a session.

        Parameters
        ----------
        model:
            Shape and dtype of the weights.
        root:
            Where hand-offs must lie; None for anywhere.
        verify_content:
            Compare every byte that is read with its hash, not only file sizes.
        """
        self._template, self._arch = model, model.arch
        self._root = root.resolve() if root is not None else None
        self._verify_content = verify_content
        self._lock = threading.Lock()
        self._spare: Qwen3Moe | None = None
        self._initialised = False
        self._active = False
        self._loaded = False

    def init(self) -> None:
        """Open the door for sessions. May be called again."""
        with self._lock:
            self._initialised = True

    def shutdown(self) -> None:
        """Close the door; an unfinished session and the second copy of the weights are dropped."""
        with self._lock:
            self._initialised = self._active = self._loaded = False
            self._spare = None

    def start(self) -> None:
        """Begin a session.

        Raises
        ------
        UpdateOrderError
            `init` was not called, or a session is open.
        """
        with self._lock:
            if not self._initialised:
                raise UpdateOrderError("call /init_weight_transfer_engine before /start_weight_update")
            if self._active:
                raise UpdateOrderError("a weight update is active; call /finish_weight_update first")
            self._active, self._loaded = True, False

    def update(self, info: dict[str, Any]) -> Handoff:
        """Read a hand-off into the second copy. A failure ends the session, as in vLLM.

        Parameters
        ----------
        info:
            ``{"path": <version directory>}``.

        Raises
        ------
        UpdateOrderError
            No session is open.
        HandoffError
            The hand-off is missing, torn, or does not fit; the served weights are untouched.
        ValueError
            ``info`` has no path, or it lies outside of the allowed root.
        """
        with self._lock:
            if not self._active:
                raise UpdateOrderError("call /start_weight_update before /update_weights")
            self._loaded = False
            try:
                handoff = Handoff.open(self._path(info))
                handoff.verify(content=False)
                check_fits(handoff, self._arch)
                if self._spare is None:
                    self._spare = copy.deepcopy(self._template)
                try:
                    tensors = read_tensors(handoff, content=self._verify_content)
                    load_hf_tensors(self._spare, self._arch, tensors)
                except ValueError as error:
                    raise HandoffError(f"{handoff.path}: {error}") from error
            except BaseException:
                self._active = False
                raise
            self._loaded = True
            return handoff

    def take(self) -> Qwen3Moe | None:
        """End the session and hand out the loaded copy; None where nothing was loaded.

        Raises
        ------
        UpdateOrderError
            No session is open.
        """
        with self._lock:
            if not self._active:
                raise UpdateOrderError("call /start_weight_update before /finish_weight_update")
            self._active = False
            if not self._loaded:
                return None
            self._loaded, model, self._spare = False, self._spare, None
            return model

    def give_back(self, model: Qwen3Moe) -> None:
        """Receive the model that is no longer served, as room for the next update."""
        with self._lock:
            self._template = self._spare = model

    def _path(self, info: dict[str, Any]) -> Path:
        value = info.get("path")
        if not isinstance(value, str) or not value:
            raise ValueError("update_info must hold 'path', the directory of a published version")
        path = Path(value).resolve()
        if self._root is not None and not path.is_relative_to(self._root):
            raise ValueError(f"{value} is outside of the weight transfer root {self._root}")
        return path
