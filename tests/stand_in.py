"""What FlashInfer documents of the calls we make, written out slowly; and a record of them. Knows no engine."""

import math
from types import SimpleNamespace

import torch


class Library:
    """A module with FlashInfer's names; ``calls`` are (name, args, kwargs) as they came."""

    def __init__(self):
        self.calls = []

    def BatchPrefillWithPagedKVCacheWrapper(self, *args, **kwargs):  # noqa: N802
        self.calls.append(("BatchPrefillWithPagedKVCacheWrapper.__init__", args, kwargs))
        assert kwargs["kv_layout"] == "NHD"
        return Wrapper(self, kwargs if kwargs.get("use_cuda_graph") else None)

    def merge_state(self, v_a, s_a, v_b, s_b):
        """Attention over the union of two sets of keys: log-sum-exps (T, heads) are float32 and of base 2."""
        self.calls.append(("merge_state", (v_a, s_a, v_b, s_b), {}))
        assert s_a.dtype == s_b.dtype == torch.float32
        s = torch.logaddexp2(s_a, s_b)
        merged = v_a.double() * torch.exp2(s_a - s)[..., None] + v_b.double() * torch.exp2(s_b - s)[..., None]
        return merged.to(v_a.dtype), s


class Wrapper:
    """Batches of queries over paged keys and values."""

    def __init__(self, library, buffers):
        self.library, self.buffers = library, buffers

    def plan(self, *args, **kwargs):
        self.library.calls.append(("BatchPrefillWithPagedKVCacheWrapper.plan", args, kwargs))
        qo, indptr, indices, last = args[:4]
        heads, kv_heads, dim, page_size = args[4:]
        assert all(x.dtype == torch.int32 for x in args[:4])
        assert len(qo) == len(indptr) == len(last) + 1
        assert len(indices) >= indptr[-1] if self.buffers else len(indices) == indptr[-1]
        assert not self.buffers or kwargs["disable_split_kv"]  # else the plan depends on the lengths
        assert qo[0] == indptr[0] == 0 and (qo.diff() > 0).all() and (indptr.diff() > 0).all()
        assert ((last >= 1) & (last <= page_size)).all()
        assert kwargs["logits_soft_cap"] is None or kwargs["logits_soft_cap"] > 0
        self.planned = SimpleNamespace(
            qo=qo.tolist(), indptr=indptr.tolist(), indices=indices.long(), last=last.tolist(), heads=heads,
            kv_heads=kv_heads, dim=dim, page_size=page_size, **{"custom_mask": None} | kwargs,
        )  # fmt: skip

    def run(self, q, cache, *, return_lse=False):
        self.library.calls.append(("BatchPrefillWithPagedKVCacheWrapper.run", (q, cache), {"return_lse": return_lse}))
        p = self.planned
        if self.buffers:  # the kernels read what lies in them now
            names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
            qo, indptr, indices, last = (self.buffers[name] for name in names)
            assert qo.tolist() == p.qo
            p.indptr, p.indices, p.last = indptr.tolist(), indices.long(), last.tolist()
        assert q.shape == (p.qo[-1], p.heads, p.dim) and q.dtype == p.q_data_type
        assert all(c.shape[1:3] == (p.page_size, p.kv_heads) and c.stride(-1) == 1 for c in cache)
        out, lse, bit = q.new_zeros(*q.shape[:2], cache[1].shape[-1]), q.new_zeros(q.shape[:2]).float(), 0
        for i in range(len(p.last)):
            pages = p.indices[p.indptr[i] : p.indptr[i + 1]]
            length = (len(pages) - 1) * p.page_size + p.last[i]
            k, v = (c[pages].flatten(0, 1)[:length].repeat_interleave(p.heads // p.kv_heads, 1) for c in cache)
            rows = slice(p.qo[i], p.qo[i + 1])
            hidden, bit = self._hidden(rows.stop - rows.start, length, bit)
            scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k.double()) * p.sm_scale
            if p.logits_soft_cap is not None:
                scores = p.logits_soft_cap * torch.tanh(scores / p.logits_soft_cap)
            scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(math.nan), v.double()).to(q.dtype)
            lse[rows] = (scores.logsumexp(-1) / math.log(2)).T.float()
        return (out, lse) if return_lse else out

    def _hidden(self, n, length, bit):
        """Which of ``length`` keys each of n queries, the last of them if causal, does not see."""
        p = self.planned
        if p.custom_mask is not None:
            return ~p.custom_mask[bit : bit + n * length].view(n, length), bit + n * length
        if not p.causal:
            assert p.window_left == -1
            return torch.zeros(n, length, dtype=torch.bool), bit
        at, seen = torch.arange(length - n, length)[:, None], torch.arange(length)
        hidden = seen > at
        return (hidden if p.window_left < 0 else hidden | (seen < at - p.window_left)), bit
