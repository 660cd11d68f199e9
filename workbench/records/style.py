"""The look of a report: colours with one meaning each, in light and in dark."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #24292f; --soft: #5c636d; --line: #d8dce1;
  --box: #f6f8fa;
  --teal: #0b7f7d; --amber: #a85a00; --red: #b3261e; --accent: #1f6fd0;
  --weights: #6b7684; --kv_payload: #2f7fd1; --kv_meta: #8a63c9; --fragmentation: #d9822b; --kv_cached:
  #9cc3ea;
  --kv_free: #d5dae0; --workspace: #a08448; --draft: #12908e;
  --schedule: #9aa3ad; --prepare: #b9a7dd; --forward: #2f7fd1; --verify: #0b7f7d; --sample: #d9822b;
  --commit: #8a63c9; --emit: #c3cad3; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --ink: #e3e6ea; --soft: #a0a7b0; --line:
  #3a414a;
  --box: #1e2227; --teal: #3fc7c0; --amber: #f0a74b; --red: #ff8a80; --accent: #64b5f6; --kv_payload:
  #5a9fe6;
  --kv_meta: #a98be0; --kv_free: #3a414a; --kv_cached: #4a6f96; --forward: #5a9fe6; --emit: #565e68; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 24px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 24px; margin: 0 0 8px; } h2 { font-size: 19px; margin: 40px 0 8px; } h3 { font-size:
  15px; margin: 24px 0 4px; }
p { margin: 4px 0 8px; } .soft { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: 8px; margin: 12px 0; padding: 0; list-style: none; }
.tiles li { background: var(--box); border: 1px solid var(--line); border-radius: 8px; padding: 8px
  12px; min-width: 128px; }
.tiles strong { display: block; font-size: 19px; }
.chip { border: 1px solid var(--line); border-radius: 12px; padding: 1px 8px; margin-right: 4px;
  white-space: nowrap; }
.warn { border-left: 3px solid var(--amber); padding-left: 8px; } .bad { border-left: 3px solid
  var(--red); padding-left: 8px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: 4px 0 12px; width: 100%; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td.n, th.n { text-align: right; } thead th { color: var(--soft); font-weight: 600; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  overflow-x: auto; white-space: pre-wrap; }
svg { display: block; width: 100%; height: auto; margin: 8px 0; } svg text { fill: var(--soft);
  font-size: 11px; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.text { background: var(--box); border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.accepted { border-bottom: 2px solid var(--teal); } .bonus { border-bottom: 2px double var(--teal); }
.corrected { border-bottom: 2px dashed var(--amber); }
details { margin: 8px 0; } summary { cursor: pointer; }
@media print { details > * { display: block; } body { max-width: none; } }
"""
