"""How a page looks: one style sheet for screens wide and narrow, light and dark, and for paper."""

from __future__ import annotations

STYLE = """
:root{--bg:#fff;--fg:#1c2128;--soft:#5b6472;--line:#dfe3e8;--panel:#f6f7f9;--free:#e3e7ec;--bad:#b42318;--warn:#8a6100;
--link:#1f5fa8;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e4e7eb;--soft:#9aa4b2;--line:#2c323a;--panel:#1b1f25;
--free:#2b3139;--bad:#ff8f85;--warn:#dcb355;--link:#7db4f0}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:1080px;padding:28px 24px 48px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
h1{font-size:26px;line-height:1.2;font-weight:650;margin:0 0 4px}
h1 small{font-weight:400;color:var(--soft);font-size:inherit}
h2{font-size:17px;font-weight:650;margin:0 0 10px}
h3{font-size:14px;font-weight:600;margin:18px 0 6px}
h4{font-size:14px;font-weight:600;margin:0 0 8px}
small{font-size:13px;color:var(--soft);font-weight:400}
h4 small{margin-left:8px}
p{margin:0 0 8px}
a{color:var(--link)}
code{font:12px/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
section{border-top:1px solid var(--line);padding-top:20px;margin-top:28px}
figure{margin:0}
ul{margin:8px 0;padding-left:18px}
li{margin:3px 0}
.note,.legend,footer{color:var(--soft);font-size:13px}
footer{border-top:1px solid var(--line);margin-top:32px;padding-top:12px}
.nil{color:var(--soft);font-weight:400}
.bad{color:var(--bad)}
.warning{border-left:3px solid var(--bad);padding:2px 14px;margin:16px 0;background:var(--panel)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:1px;margin:18px 0 14px;
background:var(--line);border:1px solid var(--line);border-radius:6px;overflow:hidden}
.figures div{background:var(--bg);padding:10px 14px}
dt{color:var(--soft);font-size:13px}
dd{margin:0;font-size:22px;line-height:1.3;font-weight:600}
.exact{color:var(--soft)}
.sw{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px;background:var(--c)}
.hollow{background:none;border:2px solid var(--c)}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:10px 0 0}
figure+p,figure+ul{margin-top:14px}
.g0{--c:#2f6db3}.g1{--c:#b3541e}.g2{--c:#2e7d5b}.g3{--c:#8a4fa3}
.g4{--c:#8a6d0f}.g5{--c:#b03a5b}.g6{--c:#2b7a8b}.g7{--c:#5f6673}
.fw{--c:#a9b7c9}.bw{--c:#5a6f8c}.ig{--c:#5a6f8c}.wg{--c:#35445a}
.tp{--c:#d9a62e}.cp{--c:#a4b86a}.ep{--c:#6b9a4b}.pp{--c:#2a9d9f}
.bu{--c:var(--free)}.dp{--c:#df7357}.op{--c:#8d5fd3}
.m0{--c:#23518c}.m1{--c:#5487bf}.m2{--c:#a3c4e5}.m3{--c:#eba23f}.m4{--c:#dd6a4b}.m5{--c:#8f969f}.m6{--c:#bcc2c9}.m7{--c:#f3c987}.limit{--c:var(--bad)}
.free{--c:var(--free)}
svg{display:block;width:100%}
svg rect,svg path,svg g{fill:var(--c)}
.lane rect,.lane path{stroke:var(--panel);stroke-width:.5px;vector-effect:non-scaling-stroke}
.strip{display:flex;gap:2px;height:26px;margin-bottom:14px}
.strip span{background:var(--c);color:#fff;font-size:12px;line-height:26px;text-align:center;min-width:1px;
flex-basis:0;overflow:hidden;border-radius:2px}
.shape p{margin:0 0 4px;font-size:13px}
.site,.nets{margin-top:16px}
.many{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));gap:0 16px}
.group{border:1px solid var(--line);border-radius:6px;padding:12px 14px;margin-bottom:10px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,230px),1fr));gap:14px 20px}
.tile p{margin:0 0 5px;font-size:13px}
.tile ul{margin:5px 0 0;padding:0;list-style:none;font-size:13px;color:var(--soft)}
.devices{display:flex;flex-wrap:wrap;gap:3px;font-size:12px}
.devices i{width:16px;height:16px;border-radius:3px;background:var(--c);border:1px solid var(--c)}
.devices .odd{background:color-mix(in srgb,var(--c) 55%,var(--bg))}
.devices .idle{background:none;border:1px solid var(--soft)}
.devices .out{background:none;border:1px dashed var(--line)}
.nets p{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;margin:4px 0}
.joins{display:flex;flex-wrap:wrap;gap:2px 12px;color:var(--soft)}
table{width:100%;border-collapse:collapse;font-size:13.5px}
th{text-align:left;font-weight:500;color:var(--soft);font-size:13px}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
td:last-child,th:last-child{padding-right:0}
.saved{display:inline-block;min-width:52px}
.meter{display:inline-block;width:90px;height:8px;margin-left:8px;background:var(--free);border-radius:2px;
overflow:hidden;vertical-align:1px}
.meter i{display:block;height:100%;background:#5a6f8c}
.lane{display:flex;align-items:center;margin-bottom:3px}
.lane-name{flex:0 0 68px;font-size:12px;white-space:nowrap;overflow:hidden}
.lane svg{flex:1;min-width:0;height:20px;background:var(--panel);touch-action:pan-y;cursor:grab}
.axis{flex:1;position:relative;height:18px;margin-right:0;font-size:12px;color:var(--soft);overflow:hidden}
.axis span{position:absolute;white-space:nowrap;padding-left:4px;border-left:1px solid var(--line)}
.axis span:last-child{transform:translateX(-100%);padding:0 4px 0 0;border-left:0;border-right:1px solid var(--line)}
.axis.live span:last-child{transform:none;padding:0 0 0 4px;border-left:1px solid var(--line);border-right:0}
.timeline:focus-visible{outline:2px solid var(--link);outline-offset:4px}
.tools{display:none;gap:6px;align-items:center;flex-wrap:wrap;margin-bottom:8px;font-size:13px;color:var(--soft)}
.live>.tools{display:flex}
button{font:inherit;min-width:30px;padding:2px 9px;color:var(--fg);background:var(--panel);cursor:pointer;
border:1px solid var(--line);border-radius:4px}
.bar{margin-bottom:12px}
.bar>p{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 12px;margin:0 0 3px;font-size:13.5px}
.bar svg{height:16px}
.bar .parts{font-size:12.5px;color:var(--soft);margin:3px 0 0;display:block}
.split{height:26px}
.lines{list-style:none;padding:0;margin:12px 0 0;max-width:560px}
.lines li{display:grid;grid-template-columns:16px 1fr auto 4.2em;gap:0 8px;align-items:center;font-size:14px;
padding:3px 0;margin:0;border-bottom:1px solid var(--line)}
.lines li>:nth-child(n+3){text-align:right}
details{margin-top:10px}
summary{cursor:pointer;font-size:14px;font-weight:600}
details table{margin:8px 0 14px}
.assumed{color:var(--warn)}
@media (max-width:720px){
body{padding:18px 14px 32px}
h1{font-size:22px}
.figures{grid-template-columns:repeat(2,1fr)}
dd{font-size:19px}
.figures div:last-child:nth-child(odd){grid-column:span 2}
.lane-name{flex-basis:52px}
.cards thead{display:none}
.cards,.cards tbody,.cards tr,.cards td{display:block}
.cards tr{padding:8px 0;border-bottom:1px solid var(--line)}
.cards td{display:flex;justify-content:space-between;gap:14px;border:0;padding:1px 0;text-align:right}
.cards td:first-child{text-align:left;font-weight:600}
.cards td:not(:first-child)::before{content:attr(data-name);color:var(--soft);flex:none}
.cards td:first-child::before{content:none}
.cards .none{display:none}
.tools span{display:none}
}
@media print{
:root{--bg:#fff;--fg:#000;--soft:#444;--line:#ccc;--panel:#f4f4f4;--free:#e3e7ec;--bad:#900;--warn:#444;--link:#000}
body{max-width:none;padding:0;font-size:11pt;-webkit-print-color-adjust:exact;print-color-adjust:exact}
.tools,.live>.tools{display:none}
section{break-inside:auto}
h2,h3,h4{break-after:avoid}
.bar,.lane,.tile,tr,li{break-inside:avoid}
}
"""
