"""The style sheet of the HTML report: system fonts, light and dark, wide and narrow."""

from __future__ import annotations

from megatron_adaptra.view.theme import ADAPTRA, STOCK

CSS = (
    f"""
:root {{
  color-scheme: light dark;
  --page: #f4f6f8; --card: #ffffff; --ink: #1b2530; --soft: #5b6875; --line: #e2e7ec;
  --edge: #c3ccd6;
  --accent: #0e7c7b; --good: #0e7c7b; --bad: #b3372f; --warn: #c97a16;
  --stock: {STOCK}; --adaptra: {ADAPTRA};
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --page: #11161c; --card: #1a212a; --ink: #e3e9ef; --soft: #98a5b3; --line: #2b3540;
    --edge: #465565;
    --accent: #57c9c5; --good: #57c9c5; --bad: #f08a80; --warn: #e0a458;
  }}
}}
"""
    + """
* { box-sizing: border-box; }
body {
  margin: 0; padding: 40px 24px 32px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main, footer { max-width: 1240px; margin: 0 auto; }
header { margin-bottom: 26px; }
.name { margin: 0 0 6px; color: var(--soft); font-size: 14px; }
h1 {
  margin: 0 0 8px; font-size: clamp(26px, 4vw, 40px); line-height: 1.15;
  letter-spacing: -.02em; font-weight: 680; text-wrap: balance;
}
header p { margin: 0; color: var(--soft); font-size: 16px; }
.result { display: inline-block; margin: 14px 18px 0 0; font-weight: 600; color: var(--good); }
.result.bad { color: var(--bad); }
.tiles { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); }
.tile, section {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
}
.tile { padding: 14px 18px; }
.tile b { display: block; font-size: 25px; line-height: 1.25; font-weight: 650; }
.tile.main b { color: var(--accent); }
.tile span { color: var(--soft); font-size: 13.5px; }
.notes { margin: 18px 0 0; padding: 12px 18px 12px 36px; border-left: 4px solid var(--warn);
  background: var(--card); border-radius: 6px; overflow-wrap: anywhere; }
section { margin-top: 18px; padding: 18px 22px 20px; }
h2 { margin: 0 0 2px; font-size: 17px; font-weight: 650; }
.note { margin: 0 0 12px; color: var(--soft); font-size: 13.5px; }
.scroll { overflow-x: auto; background:  /* a shadow at the right until the end is in view */
  linear-gradient(to left, var(--card) 50%, transparent) right / 60px 100% no-repeat local,
  linear-gradient(to left, var(--edge), transparent) right / 18px calc(100% - 1px) no-repeat; }
.scroll + .scroll, .scroll + .note { margin-top: 14px; }
.whole { white-space: nowrap; }
.gantt { display: block; width: 100%; min-width: 820px; height: auto; }
.gantt + .gantt { margin-top: 12px; }
.gantt.predicted + .gantt { margin-top: 24px; }
.chart { display: block; width: 100%; height: auto; }
.pair { display: grid; gap: 18px; margin-top: 18px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); }
.pair > section { margin-top: 0; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 0 0 14px; color: var(--soft);
  font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 6px;
  border-radius: 3px; vertical-align: -1px; }
.legend i.message { height: 0; width: 16px; border-radius: 0; border-top: 2px solid;
  vertical-align: 4px; }
.legend i.dot { border-radius: 50%; }
.legend i.bar { width: 4px; height: 14px; border-radius: 1px; vertical-align: -2px; }
.scroll > .chart { min-width: 520px; }
.wide td:first-child { white-space: nowrap; }
.wide th { white-space: normal; vertical-align: bottom; }
.wide td:last-child { white-space: normal; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 7px 14px 7px 0; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
th:last-child, td:last-child { padding-right: 0; }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
tr.group th { padding-top: 16px; color: var(--ink); }
tbody tr:last-child td { border-bottom: 0; }
td.wraps { white-space: normal; min-width: 84px; }
td.strong { font-weight: 650; color: var(--accent); }
td.plain { color: inherit; }
.tile.bad b, td.bad { color: var(--bad); }
th i { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 7px; }
.replans { list-style: none; margin: 10px 0 0; padding: 0; }
.replans li { display: grid; grid-template-columns: 120px 1fr; gap: 4px 18px; padding: 10px 0;
  border-top: 1px solid var(--line); overflow-wrap: anywhere; }
.replans b { color: var(--accent); font-weight: 650; }
.replans small { display: block; color: var(--soft); font-size: 13.5px; }
footer { padding: 22px 4px 0; color: var(--soft); font-size: 12.5px; overflow-wrap: anywhere; }
footer p { margin: 0 0 6px; }
footer b { font-weight: 600; }
footer span { margin-right: 14px; display: inline-block; }
@media (max-width: 640px) {
  body { padding: 24px 12px; font-size: 14px; }
  section { padding: 14px 14px 16px; }
  th, td { padding-right: 10px; }
  th, table:not(.wide) td, .wide td:first-child { white-space: normal; }
  th:has(i), .wide td:last-child { white-space: nowrap; }
  .wide td:first-child { min-width: 96px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 10px; }
  .tile { padding: 11px 13px; }
  .tile b { font-size: 18px; }
  .replans li { grid-template-columns: 1fr; }
}
"""
)
