// Pool maps: two panels over one time slider. The state is in the URL: #arm=placement&left=stock&t=5&view=time

const PRIVATE = ["#0072B2", "#E07B00", "#00936B", "#C4372E", "#B65FA5", "#3FA7E0", "#6F4BB8", "#7E7A1E", "#E0568A", "#12A5A5", "#8A5A3C", "#5E9C2F"];
const FIRST_PRIVATE = 4;
const KINDS = ["free", "cached", "reserved", "shared"];
const KIND_TEXT = [
  "free", "cached in the prefix tree, used by nobody", "reserved ahead of need", "shared by several running requests",
];

// Undoes `payload.map_bytes`: planes of low and high bytes, each map XORed with the one before.
function unpackMaps(bytes, arms) {
  let at = 0;
  for (const arm of arms) {
    let before = null;
    for (const map of arm.maps) {
      const planes = bytes.slice(at, (at += 2 * map.cells));
      if (before?.length === planes.length) for (let i = 0; i < planes.length; i++) planes[i] ^= before[i];
      map.owners = Uint16Array.from({ length: map.cells }, (_, i) => planes[i] | (planes[map.cells + i] << 8));
      before = planes;
    }
  }
}

function rgb(hex) {
  const n = parseInt(hex.length === 4 ? hex.slice(1).replace(/./g, "$&$&") : hex.slice(1), 16);
  return [n >> 16, (n >> 8) & 255, n & 255];
}

function ownerText(owner) {
  return owner < FIRST_PRIVATE ? KIND_TEXT[owner] : `private to the request in table row ${owner - FIRST_PRIVATE + 1}`;
}

function nearest(values, wanted) {
  let best = 0;
  values.forEach((value, i) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = i; });
  return best;
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;
const seconds = (time) => `${time.toLocaleString("en", { maximumFractionDigits: 1 })} s`;

class Panel {
  constructor(figure, tip, slots) {
    [this.caption, this.canvas, this.shares] = figure.children;
    Object.assign(this, { tip, slots, map: null, picked: null, cursor: 0 });
    this.canvas.addEventListener("pointermove", (event) => this.point(this.cellAt(event), event.clientX, event.clientY));
    this.canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    this.canvas.addEventListener("blur", () => { tip.hidden = true; });
    this.canvas.addEventListener("click", (event) => this.pick(this.cellAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  show(arm, map) {
    Object.assign(this, { arm, map });
    this.columns = 2 ** Math.max(0, Math.floor(Math.log2(Math.sqrt(2 * map.cells)) + 0.4));
    this.rows = Math.ceil(map.cells / this.columns);
    this.paint();
    const at = nearest(arm.series.time_s, map.time_s);
    const coverage = arm.series.coverage[at], run = arm.series.mean_run[at];
    this.caption.replaceChildren(Object.assign(document.createElement("b"), { textContent: arm.name }),
      ` at ${seconds(map.time_s)}` + (coverage == null ? "" : `: coverage ${percent(coverage)}`) + (run == null ? "" : `, mean run ${run.toFixed(1)} slots`));
    const counts = [0, 0, 0, 0, 0];
    map.owners.forEach((owner) => counts[Math.min(owner, FIRST_PRIVATE)]++);
    this.shares.textContent = "Cells: " + [...KINDS, "private"].map((kind, i) => `${kind} ${percent(counts[i] / map.cells)}`).join(" · ");
    this.canvas.setAttribute("aria-label", `Pool map of ${arm.name} at ${seconds(map.time_s)}. ${this.shares.textContent}`);
  }

  paint() {
    const { canvas, map, columns, rows, picked } = this;
    Object.assign(canvas, { width: columns, height: rows });
    canvas.style.aspectRatio = `${columns} / ${rows}`;
    const ground = rgb(css("--ground")), kinds = KINDS.map((kind) => rgb(css("--" + kind))), requests = PRIVATE.map(rgb);
    const image = new ImageData(columns, rows);
    map.owners.forEach((owner, i) => {
      const full = owner < FIRST_PRIVATE ? kinds[owner] : requests[(owner - FIRST_PRIVATE) % PRIVATE.length];
      const weight = picked === null || picked === owner ? 1 : 0.16;
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = weight * full[c] + (1 - weight) * ground[c];
      image.data[4 * i + 3] = 255;
    });
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left - 1) / (box.width - 2)) * this.columns);
    const y = Math.floor(((event.clientY - box.top - 1) / (box.height - 2)) * this.rows);
    const inside = x >= 0 && x < this.columns && y >= 0 && y < this.rows;
    return inside && y * this.columns + x < this.map.cells ? y * this.columns + x : -1;
  }

  point(cell, x, y) {
    this.tip.hidden = cell < 0;
    if (cell < 0) return;
    const { slots_per_cell: per, owners, time_s } = this.map, owner = owners[cell];
    const last = Math.min((cell + 1) * per - 1, this.slots ?? Infinity), held = owners.filter((other) => other === owner).length;
    // Slot 0 is the sink for padding and belongs to nobody.
    this.tip.textContent = `slots ${Math.max(1, cell * per).toLocaleString("en")} to ${last.toLocaleString("en")}\n` +
      `${per > 1 ? "mostly " : ""}${ownerText(owner)} (${held.toLocaleString("en")} cells)\n${seconds(time_s)}`;
    const box = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    this.tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
  }

  pick(cell) {
    const owner = cell < 0 ? null : this.map.owners[cell];
    this.picked = owner === this.picked ? null : owner;
    this.paint();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (event.key === "Enter" || event.key === " ") this.pick(this.cursor);
    else if (step === undefined) return;
    else this.cursor = Math.max(0, Math.min(this.map.cells - 1, this.cursor + step));
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect(), y = Math.floor(this.cursor / this.columns);
    this.point(this.cursor, box.left + ((this.cursor % this.columns) / this.columns) * box.width, box.top + (y / this.rows) * box.height);
  }
}

function drawLegend() {
  const swatch = (colour) => Object.assign(document.createElement("i"), { style: `background:${colour}` });
  const items = KINDS.map((kind, i) => [[`var(--${kind})`], KIND_TEXT[i]]);
  items.push([PRIVATE, `private, one colour to a request; colours repeat after ${PRIVATE.length}`]);
  document.getElementById("map-legend").replaceChildren(...items.map(([colours, text]) => {
    const item = document.createElement("li");
    item.append(...colours.map(swatch), text);
    return item;
  }));
}

function readHash(arms, bound) {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const named = (name) => arms.find((arm) => arm.name === name);
  const right = named(wanted.get("arm")) ?? named("default") ?? arms.findLast((arm) => arm.name !== bound) ?? arms[0];
  const last = right.maps.length - 1, time = parseInt(wanted.get("t") ?? last, 10);
  return {
    left: named(wanted.get("left")) ?? named("stock") ?? arms[0], right,
    time: Number.isNaN(time) ? last : Math.max(0, Math.min(last, time)),
    view: wanted.get("view") === "first-last" ? "first-last" : "time",
  };
}

function drawPoolMaps(data) {
  const arms = data.arms.filter((arm) => arm.maps.length);
  const section = document.getElementById("pool-map"), note = document.getElementById("map-note");
  if (!arms.length) {
    section.querySelectorAll(".controls, .maps, .legend").forEach((part) => { part.hidden = true; });
    note.textContent = "This run kept no pool maps.";
    return;
  }
  const [left, right, view, slider, clock, play] = ["left", "right", "view", "time", "clock", "play"].map((id) => document.getElementById("map-" + id));
  const tip = document.getElementById("tip");
  const panels = ["left", "right"].map((side) => new Panel(document.getElementById("panel-" + side), tip, data.pool_slots));
  for (const chooser of [left, right]) chooser.append(...arms.map((arm) => new Option(arm.name, arm.name)));
  let state = readHash(arms, data.bound);

  const show = () => {
    const map = state.right.maps[state.time], pair = view.value === "first-last";
    const other = pair ? state.right : state.left;
    panels[0].show(other, pair ? other.maps[0] : other.maps[nearest(other.maps.map((one) => one.time_s), map.time_s)]);
    panels[1].show(state.right, map);
    clock.textContent = `${state.time + 1} of ${state.right.maps.length}: ${seconds(map.time_s)}`;
    slider.setAttribute("aria-valuetext", clock.textContent);
    note.textContent = `One cell is ${map.slots_per_cell.toLocaleString("en")} slots. Left and right show the maps nearest in time; table rows are reused, so a colour is one request only for a while.`;
  };
  const apply = () => {
    left.value = state.left.name; right.value = state.right.name; view.value = state.view;
    left.disabled = state.view === "first-last";
    slider.max = state.right.maps.length - 1; slider.value = state.time;
    show();
  };
  const change = () => {
    const named = (name) => arms.find((arm) => arm.name === name);
    const arm = named(right.value), wanted = state.right.maps[Math.min(+slider.value, state.right.maps.length - 1)].time_s;
    const time = arm === state.right ? +slider.value : nearest(arm.maps.map((map) => map.time_s), wanted);
    state = { left: named(left.value), right: arm, time, view: view.value };
    const hash = new URLSearchParams({ arm: arm.name, left: state.left.name, t: state.time, view: state.view });
    try { history.replaceState(null, "", "#" + hash); } catch { /* a viewer that forbids it only loses the link */ }
    apply();
  };
  let timer = 0;
  const stop = () => { clearInterval(timer); timer = 0; play.textContent = "Play"; };
  const advance = () => {
    if (+slider.value >= +slider.max) return stop();
    slider.value = +slider.value + 1;
    change();
  };
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (+slider.value >= +slider.max) slider.value = 0;
    play.textContent = "Stop";
    timer = setInterval(advance, 450);
    change();
  });
  document.getElementById("map-controls").addEventListener("input", change);
  document.getElementById("map-controls").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", () => { state = readHash(arms, data.bound); apply(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  drawLegend();
  apply();
}
