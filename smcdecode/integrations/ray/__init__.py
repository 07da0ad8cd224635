"""Many machines, by Ray: offline jobs and online replicas; needs the extra ``ray``. Docs: docs/scale.md."""
