"""The most bytes that new tensors hold at a time, counted operation by operation; what is done inside one is not seen.

    with Peak() as peak: something()
    peak.most, peak.left
"""
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
import torch


class Peak(TorchDispatchMode):
    "`most`: bytes at the worst moment, over what was there before; `left`: what is still there of it now."
    def __enter__(self):
        self.held, self.most = {}, 0
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(found):
            if not isinstance(x, torch.Tensor): continue
            storage = x.untyped_storage()
            if storage._cdata in given and storage._cdata not in self.held: continue     # a view of what was there
            self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.left)
        return found

    @property
    def left(self):
        self.held = {key: (ref, size) for key, (ref, size) in self.held.items() if not ref.expired()}
        return sum(size for _, size in self.held.values())
