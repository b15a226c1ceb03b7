"use strict";

const PERIOD_S = 10, MOST_REQUESTS = 200, REFRESH_MS = 2000, TIMEOUT_MS = 20000;
const SOURCES = {
  resident: "SGLang's pool", shared: "slots that others loaded", loaded: "the store", blended: "the store, from behind other text",
  unused: "left out of a prefix in part", computed: "computed",
};
const BADGES = { pending: "being written", suspect: "suspect", lost: "lost" };
const $ = (id) => document.getElementById(id);
const fromFile = location.protocol === "file:";
let key = "", server = "", since = 0, last = 0, timer = 0;
let paused = false, busy = false, again = false;
let requests = [], drawn = "";
const opened = new Map();  // of a segment's id what builds on it

// Text of prompts and names comes from strangers: it is never anything but text here.
function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name in node) node[name] = value; else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const count = (number) => Math.round(number).toLocaleString("en");
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "0%");
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

function bytes(number) {
  let unit = 0;
  for (; number >= 999.5 && unit < 4; unit += 1) number /= 1000;
  return `${unit && number < 99.5 ? number.toFixed(1) : Math.round(number)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

function duration(ms) {
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  const s = ms / 1000;
  return s < 120 ? `${s.toFixed(s < 10 ? 2 : 0)} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
}

// Parts {name: size} side by side; what is left of `whole` stays empty.
function bar(parts, whole, label) {
  const node = el("div", { className: "bar", role: "img", "aria-label": label, title: label });
  for (const [name, size] of Object.entries(parts)) {
    if (size <= 0) continue;
    const part = el("span", { className: name });
    part.style.width = `${Math.min((100 * size) / (whole || 1), 100)}%`;
    node.append(part);
  }
  return node;
}

function terms(pairs) {
  return pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]);
}

function showState(text, good) {
  const node = $("state");
  if (node.textContent !== text) node.textContent = text;  // so that it is read out once
  node.className = `state ${good ? "good" : "bad"}`;
}

function showHead(stats) {
  const health = stats.store ? stats.store.health : null;
  const state = stats.suspended ?? (health ? health.state : "no store");
  const failed = health && health.state !== "ok" && health.last_failure ? `: ${health.last_failure}` : "";
  showState(state === "ok" ? "in use" : state + failed, state === "ok");
  const { policy, bits, write_after, ttl } = stats.config;
  const kept = ttl ? `, kept for ${duration(1000 * ttl)}` : "";
  $("model").textContent = `${stats.identity.slice(0, 12)}, policy ${policy}, ${bits} bits, stored at sight ${write_after}${kept}`;
  $("updated").textContent = new Date().toLocaleTimeString([], { hour12: false });
}

function showTiers(stats) {
  const { store, cache, device_pool: pool } = stats;
  const rows = [];
  if (store) rows.push(["SSD", store.used_bytes, store.quota_bytes, bytes]);
  if (cache) {
    rows.push(["CPU memory, chunk cache", cache.host.used_bytes, cache.host.capacity_bytes, bytes]);
    rows.push(["GPU memory, chunk cache", cache.device.used_bytes, cache.device.capacity_bytes, bytes]);
  }
  if (store) rows.push(["Read buffers", store.buffer_used_bytes, store.buffer_bytes, bytes]);
  const jobs = "loading_tokens" in pool;
  const kinds = jobs ? ["loading", "writing"] : ["private", "held"];
  const ours = kinds.reduce((sum, kind) => sum + pool[`${kind}_tokens`], 0);
  const name = jobs ? "Slots being loaded and written" : "Slots with stored prefixes";
  rows.push([name, ours, pool.tokens, (tokens) => count(tokens)]);
  $("tiers").replaceChildren(...rows.map(([name, used, limit, format]) => {
    const text = `${format(used)} of ${format(limit)}`;
    return el("div", { className: "tier" }, el("span", {}, name), el("span", { className: "muted" }, text),
      bar({ resident: used }, limit, `${name}: ${text}`));
  }));
}

function showFacts({ totals, store, pins, integrity }) {
  const rows = [["Requests", count(totals.requests)], ["Computing was faster", count(totals.requests_declined)]];
  if (store) {
    const amplified = totals.ssd_needed_bytes ? (totals.ssd_bytes / totals.ssd_needed_bytes).toFixed(2) : "none";
    const damaged = store.segments_quarantined + store.segments_gone;
    rows.push(["Read from SSD", bytes(totals.ssd_bytes)], ["Read amplification", amplified], ["Written to SSD", bytes(store.bytes_written)],
      ["Evicted from SSD", count(store.segments_evicted)], ["No room to store", count(store.offers_without_space)],
      ["Pinned", `${count(pins.prefixes)}, ${bytes(pins.bytes)}`], ["Damaged or gone", count(damaged)],
      ["Failures of the disk", count(store.health.failures)], ["Integrity check", integrity]);
  }
  $("facts").replaceChildren(...terms(rows));
}

function showSources(periods, now) {
  const names = Object.keys(SOURCES);
  const span = Math.min(Math.max(now - (periods.length ? periods[0][0] : now), 120), 1800), start = now - span;
  const shown = periods.filter((own) => own[0] + PERIOD_S > start), paths = names.map(() => "");
  const width = (180 * PERIOD_S) / span;
  for (const [begin, ...tokens] of shown) {
    const x = (180 * (begin - start)) / span, all = sum(tokens);
    let y = 60;
    tokens.forEach((own, place) => {
      const height = (60 * own) / (all || 1);
      y -= height;
      paths[place] += `M${x.toFixed(2)} ${y.toFixed(2)}h${width.toFixed(2)}v${height.toFixed(2)}h-${width.toFixed(2)}z`;
    });
  }
  $("chart").replaceChildren(...names.map((name, place) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", name);
    path.setAttribute("d", paths[place]);
    return path;
  }));
  const totals = names.map((_, place) => sum(shown.map((own) => own[place + 1]))), all = sum(totals);
  $("ratio").textContent = percent(all - totals[names.indexOf("computed")], all);
  $("ratio-of").textContent = `of ${count(all)} prompt tokens were not computed`;
  $("chart-from").textContent = `${Math.round(span / 60)} min ago`;
  $("chart").setAttribute("aria-label", names.map((name, place) => `${SOURCES[name]} ${percent(totals[place], all)}`).join(", "));
  $("legend").replaceChildren(...names.map((name, place) =>
    el("li", {}, el("i", { className: name }), `${SOURCES[name]} ${percent(totals[place], all)}`)));
}

const named = (text, digest) =>
  (text === null ? el("span", { className: "name digest" }, digest || "short") : el("span", { className: "name" }, text));

function requestRow(own) {
  const all = sum(Object.values(own.tokens)), to = own.waited_ms + own.loading_ms + own.computing_ms;
  const split = Object.keys(SOURCES).map((name) => `${count(own.tokens[name])} ${["computed", "unused"].includes(name) ? "" : "from "}${SOURCES[name]}`).join(", ");
  const times = `waited ${duration(own.waited_ms)}, loaded ${duration(own.loading_ms)}, computed ${duration(own.computing_ms)}`;
  const button = el("button", { type: "button", className: "open", "aria-expanded": "false" }, named(own.text, own.begins.slice(0, 10)));
  const row = el("tr", {}, el("td", { className: "muted" }, new Date(1000 * own.ended).toLocaleTimeString([], { hour12: false })),
    el("td", { className: "begins" }, button), el("td", { className: "number wide" }, count(all)), el("td", {}, bar(own.tokens, all, split)),
    el("td", {}, el("div", { className: "time" }, el("span"), el("span", { className: "number" }, duration(to)))),
    el("td", { className: "why wide" }, own.why ? own.why.text : ""));
  button.addEventListener("click", () => {
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) row.nextSibling.remove(); else row.after(requestDetail(own, split));
  });
  const draw = (scale) => row.querySelector(".time").firstChild.replaceWith(
    bar({ waited: own.waited_ms, loaded: own.loading_ms, computed: own.computing_ms }, scale, times));
  return { own, row, to, draw };
}

function requestDetail(own, split) {
  const [load, compute] = [own.estimated_load_ms, own.estimated_recompute_ms];
  const estimates = compute === null ? "none" :
    load === null ? `compute at most ${duration(compute)}` : `load ${duration(load)}, compute ${duration(compute)}`;
  const rows = [["Request", own.rid], ["Reason", own.why ? [own.why.reason, own.why.rest].filter(Boolean).join(", ") : "none"],
    ["Decision", own.decision], ["Estimates", estimates], ["Waited in the queue", duration(own.waited_ms)],
    ["Loading", `${duration(own.loading_ms)}, of it ${duration(own.wait_ms)} for the drive`], ["Computing", duration(own.computing_ms)],
    ["Read from SSD", bytes(own.ssd_bytes) + (own.prefetched ? ", begun while it waited" : "")],
    ["Bits", own.bits_mean ?? "16"], ["Attended", `${count(own.used_tokens)} tokens of its prefix`],
    ["Approximate", own.approximate ? "yes" : "no"]];
  if (own.blended_tokens) rows.push(["Stored behind other text", `${count(own.blended_tokens)} tokens`]);
  if (own.not_stored) rows.push(["Not stored", own.not_stored]);
  return el("tr", { className: "detail" }, el("td", { colSpan: 6 }, el("p", {}, own.why ? own.why.text : "It was not admitted."),
    el("p", { className: "muted" }, `Its tokens: ${split}.`),
    el("dl", {}, ...rows.map((pair) => el("div", {}, ...terms([pair]))))));
}

function showRequests(news) {
  const body = $("requests");
  for (const own of [...news].reverse()) {
    const made = requestRow(own);
    requests.unshift(made);
    body.prepend(made.row);
  }
  for (const old of requests.splice(MOST_REQUESTS)) {
    if (old.row.nextSibling) old.row.nextSibling.remove();  // its details
    old.row.remove();
  }
  if (requests.length) last = requests[0].own.number;
  // A few that took long must not make all others invisible.
  const times = requests.map((own) => own.to).sort((a, b) => a - b), scale = times[Math.floor(0.95 * (times.length - 1))];
  for (const own of requests) own.draw(Math.max(scale, 1));
  $("requests-of").textContent = requests.length ? `${requests.length}, the last one first` : "none yet";
}

function cached(part, whole) {
  return part ? [`${bytes(part)} `, el("span", { className: "muted" }, percent(part, whole))] : [el("span", { className: "muted" }, "0")];
}

function segmentRow(own, depth, severalNamespaces) {
  const badges = [own.pinned && "pinned", !own.exact && "approximate", BADGES[own.state]].filter(Boolean)
    .map((text) => el("span", { className: "badge" }, text));
  if (!depth && severalNamespaces) badges.push(el("span", { className: "badge wide" }, `namespace ${own.namespace.slice(0, 6)}`));
  const name = el("div", { title: `segment ${own.segment}, namespace ${own.namespace}` },
    named(own.text, (own.begins || own.segment).slice(0, 10)), ...badges);
  name.style.paddingLeft = `${Math.min(depth, 8) * 1.2}rem`;
  if (own.builders) {
    const more = el("button", { type: "button", className: "more", "aria-expanded": String(opened.has(own.segment)) },
      `${count(own.builders)} on top`);
    more.dataset.segment = own.segment;
    more.addEventListener("click", () => {
      if (!opened.delete(own.segment)) opened.set(own.segment, []);
      refresh();
    });
    name.append(more);
  }
  const uses = own.uses_ago ? `${count(own.uses_ago)} ${own.uses_ago > 1 ? "uses" : "use"} ago` : "the last one";
  const cells = [[`${count(own.from_token)} to ${count(own.from_token + own.tokens)}`], [own.ssd_bytes ? bytes(own.ssd_bytes) : "0"],
    cached(own.host_bytes, own.ssd_bytes), cached(own.device_bytes, own.ssd_bytes)].map((content) => el("td", { className: "number" }, ...content));
  return el("tr", {}, el("td", { className: "begins" }, name), ...cells,
    el("td", { className: "number" }, count(own.hits)), el("td", { className: "number wide" }, uses));
}

function showSegments(stats, latest) {
  const body = $("segments"), known = new Map(), below = new Map(), rows = [];
  for (const own of [...latest, ...[...opened.values()].flat()]) if (!known.has(own.segment)) known.set(own.segment, own);
  const all = stats.store ? stats.store.segments : 0;
  $("segments-of").textContent = all ? `${count(known.size)} of ${count(all)}, those used last` : stats.store ? "nothing is stored yet" : "no store is open";
  const state = JSON.stringify([...known.values()]) + [...opened.keys()];
  if (state === drawn) return;  // what is selected or focused stays so
  drawn = state;
  for (const own of known.values()) {
    const place = known.has(own.on) ? own.on : null;
    below.set(place, [...(below.get(place) ?? []), own]);
  }
  const several = new Set([...known.values()].map((own) => own.namespace)).size > 1;
  const walk = (id, depth) => (below.get(id) ?? []).forEach((own) => {
    rows.push(segmentRow(own, depth, several));
    walk(own.segment, depth + 1);
  });
  walk(null, 0);
  const focused = body.contains(document.activeElement) ? document.activeElement.dataset.segment : null;
  body.replaceChildren(...rows);
  if (focused) [...body.querySelectorAll("button")].find((own) => own.dataset.segment === focused)?.focus();
}

async function ask(query) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(`${server}impress/overview?${new URLSearchParams(query)}`, { headers, signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (response.status === 401) $("login").hidden = false;
  const found = await response.json();
  if (!response.ok) throw new Error(found.error ?? response.statusText);
  return found;
}

async function refresh() {
  clearTimeout(timer);
  again = busy;
  if (busy) return;
  busy = true;
  try {
    const found = await ask({ after: last });
    for (const id of opened.keys()) opened.set(id, (await ask({ below: id })).segments);
    $("login").hidden = true;
    $("main").hidden = false;
    if (since !== found.since) {  // another server than before
      again = since !== 0;
      [since, last, requests] = [found.since, 0, []];
      $("requests").replaceChildren();
      opened.clear();
    }
    showHead(found.stats);
    showTiers(found.stats);
    showFacts(found.stats);
    showSources(found.periods, found.now);
    if (found.requests.length || !requests.length) showRequests(found.requests);
    showSegments(found.stats, found.segments);
  } catch (error) {
    showState($("login").hidden ? `no answer: ${error.message}` : "a key is needed", false);
  }
  busy = false;
  if (again) return void refresh();
  if (!paused && !document.hidden) timer = setTimeout(refresh, REFRESH_MS);
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Pause";
  if (!paused) refresh(); else clearTimeout(timer);
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && !paused) refresh(); });
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  if (fromFile) server = `${$("server").value.replace(/\/+$/, "")}/`;
  refresh();
});
$("server-label").hidden = !fromFile;
$("login").hidden = !fromFile;
if (!fromFile) refresh();
