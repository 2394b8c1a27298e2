// Draws the charts of a report page with uPlot, out of the JSON in #data (page_charts.h says what it holds).
//
// A dragged range zooms every chart to these steps, and a double click shows all of them again. The values beside the
// names of a chart are those at the pointer, or else the last ones.
(() => {
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const root = document.documentElement;
const severalRuns = data.runs.length > 1;
const charts = [];
let zoom = null;  // [first step, last step], or null for all
let theme = {};

const element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
const press = (button, pressed) => button.setAttribute('aria-pressed', String(pressed));

function readTheme() {
  const style = getComputedStyle(root);
  const color = name => style.getPropertyValue('--' + name).trim();
  theme = {muted: color('muted'), grid: color('grid'), mark: color('mark'), card: color('card'),
           series: [...Array(8).keys()].map(i => color('c' + i))};
}
const colorOf = index => theme.series[index % 8];

// Numbers ------------------------------------------------------------------------------------------------------------

function valueText(value) {
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (size < 1e-3 || size >= 1e9) return trimmed(value.toExponential(3));
  if (size >= 1000) return value.toLocaleString('en-US', {maximumFractionDigits: 0});
  return trimmed(value.toPrecision(5));
}
const stepText = step => step.toLocaleString('en-US', {maximumFractionDigits: 0});
function trimmed(text) {
  const [digits, power] = text.split('e');
  const short = digits.includes('.') ? digits.replace(/\.?0+$/, '') : digits;
  return power === undefined ? short : `${short}e${Number(power)}`;
}

// `isSmall`: every label of the axis is in scientific notation.
function tickText(value, spacing, isSmall = false) {
  const size = Math.abs(value);
  if (size < 1e-12) return '0';
  if (size >= 1e4) {
    const [unit, name] = size >= 1e9 ? [1e9, 'G'] : size >= 1e6 ? [1e6, 'M'] : [1e3, 'k'];
    return trimmed((value / unit).toPrecision(6)) + name;
  }
  if (size < 1e-3 || isSmall) return trimmed(value.toExponential(2));
  const digits = Math.max(0, Math.min(6, 1 - Math.floor(Math.log10(spacing || size))));
  return trimmed(value.toFixed(digits));
}

function roundSpacing(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(factor => factor * power).find(spacing => spacing >= least * (1 - 1e-9));
}

function linearTicks(low, high, most) {
  const spacing = roundSpacing((high - low) / Math.max(1, most));
  const ticks = [];
  for (let i = Math.ceil(low / spacing - 1e-9); i * spacing <= high + 1e-9 * spacing; ++i) {
    ticks.push(Number((i * spacing).toPrecision(12)));
  }
  return ticks;
}

// Powers of ten, with 2 and 5 times them where there is room; round numbers within less than about one decade.
function logTicks(low, high, pixels) {
  const decades = Math.log10(high / low);
  if (decades < 1.3) return linearTicks(low, high, Math.max(2, pixels / 55)).filter(tick => tick > 0);
  const perDecade = pixels / decades;
  const factors = perDecade > 75 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(24 / perDecade));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); ++power) {
    if (power % every !== 0) continue;
    for (const factor of factors) ticks.push(Number((factor * 10 ** power).toPrecision(12)));
  }
  return ticks.filter(tick => tick >= low && tick <= high);
}

// Data ---------------------------------------------------------------------------------------------------------------

// One list of steps for all series: null is a gap, undefined a step that only other series have.
function joined(series, isLog) {
  const steps = [...new Set(series.flatMap(one => one.x))].sort((a, b) => a - b);
  const places = new Map(steps.map((step, place) => [step, place]));
  const columns = series.map(one => {
    const column = new Array(steps.length).fill(undefined);
    one.x.forEach((step, i) => { column[places.get(step)] = isLog && one.y[i] <= 0 ? null : one.y[i]; });
    return column;
  });
  return [steps, ...columns];
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
}

// The index of the point that is shown at a step; null beside the ends of the series.
function pointAt(series, step) {
  const {x} = series, last = x.length - 1;
  if (step === null) return last;
  const between = last > 0 ? (x[last] - x[0]) / last : Infinity;
  if (step < x[0] - between || step > x[last] + between) return null;
  return nearest(x, step);
}

// The value of the line between two points; null beside the ends and in a gap.
function lineAt({x, y}, step) {
  const right = x.findIndex(other => other >= step);
  if (right <= 0 || y[right] === null || y[right - 1] === null) return null;
  return y[right - 1] + (y[right] - y[right - 1]) * (step - x[right - 1]) / (x[right] - x[right - 1]);
}

const everyStep = data.charts.flatMap(chart => chart.series.flatMap(one => [one.x[0], one.x[one.x.length - 1]]));
const allSteps = everyStep.length ? [Math.min(...everyStep), Math.max(...everyStep)] : [0, 1];
if (allSteps[0] === allSteps[1]) { allSteps[0] -= 1; allSteps[1] += 1; }

function setZoom(range) {
  zoom = range && (range[0] > allSteps[0] || range[1] < allSteps[1]) ? range : null;
  for (const chart of charts) chart.showZoom();
}

// One chart ----------------------------------------------------------------------------------------------------------

class Chart {
  constructor(spec, figure) {
    this.spec = spec;
    this.plot = figure.querySelector('.plot');
    this.isWide = figure.classList.contains('wide');
    this.isLog = false;
    this.hidden = new Set();  // indices into spec.series
    this.legend = figure.insertBefore(element('div', {className: 'legend'}), this.plot);
    this.bubble = element('div', {className: 'bubble', hidden: true});
    this.hiddenNote = element('li');
    this.addTools(figure);
    this.addLegend();
    this.build();
    this.plot.tabIndex = 0;
    this.plot.setAttribute('role', 'img');
    this.plot.setAttribute('aria-label', `${spec.title} (${spec.unit}) by step; arrow keys move the pointer`);
    this.plot.addEventListener('keydown', event => this.onKey(event));
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }

  addTools(figure) {
    this.reset = element('button', {type: 'button', textContent: 'Reset zoom', hidden: true});
    this.reset.addEventListener('click', () => setZoom(null));
    const tools = element('span', {className: 'tools'}, this.reset);
    if (this.spec.log) {
      const box = element('input', {type: 'checkbox'});
      box.addEventListener('change', () => { this.isLog = box.checked; this.build(); });
      tools.append(element('label', {className: 'switch'}, box, 'log axis'));
    }
    figure.querySelector('figcaption').append(tools);
    this.notes = figure.querySelector('.notes') || figure.appendChild(element('ul', {className: 'notes'}));
  }

  // A button for each line, or for each run if there are several: then the mean's value is behind that of the step.
  addLegend() {
    this.at = this.legend.appendChild(element('span', {className: 'at'}));
    this.values = [];
    this.spec.series.forEach((series, index) => {
      const value = element('span', {className: 'value'}), far = element('span', {className: 'far'});
      if (severalRuns && series.mean) {
        const {button} = this.values[index - 1];
        button.append(element('span', {className: 'of-mean'}, 'mean ', value));
        this.values.push({value, far, button});
        return;
      }
      const swatch = element('i', {className: `swatch c${series.color % 8}`});
      swatch.classList.toggle('faint', series.faint && !severalRuns);
      swatch.classList.toggle('dashed', series.color >= 8);
      const name = element('span', {className: 'name', textContent: severalRuns ? data.runs[series.run].name : series.name});
      const button = element('button', {type: 'button'}, swatch, name, value, far);
      press(button, true);
      button.addEventListener('click', () => toggle(this, index));
      this.legend.append(button);
      this.values.push({value, far, button});
    });
  }

  seriesOptions(series, index) {
    return {
      label: series.name,
      show: !this.hidden.has(index),
      stroke: () => colorOf(series.color),
      width: series.faint ? 1 : 2,
      alpha: series.faint ? 0.38 : 1,
      dash: series.color >= 8 ? [6, 4] : undefined,
      points: series.dots ? {show: true, size: 6, fill: () => colorOf(series.color)}
                          : {size: 5, fill: () => colorOf(series.color), filter: alonePoints},
    };
  }

  // The lines that enter and leave a zoomed chart count, too, not only the points in it.
  yRange(u, low, high) {
    for (const value of zoom ? this.valuesAtEdges() : []) {
      low = low === null ? value : Math.min(low, value);
      high = high === null ? value : Math.max(high, value);
    }
    if (low === null || high === null) return this.isLog ? [0.1, 10] : [0, 1];
    if (this.isLog) {
      const a = Math.log10(low), b = Math.log10(high), pad = Math.max(0.06 * (b - a), 0.01);
      return [10 ** (a - pad), 10 ** (b + pad)];
    }
    if (this.spec.zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
    const spread = high > low ? high - low : 0.2 * Math.abs(high) || 1;
    return [this.spec.zero && low >= 0 ? 0 : low - 0.06 * spread, high + 0.06 * spread];
  }

  valuesAtEdges() {
    const shown = this.spec.series.filter((series, index) => !this.hidden.has(index));
    const values = shown.flatMap(series => zoom.map(step => lineAt(series, step)));
    return values.filter(value => value !== null && !(this.isLog && value <= 0));
  }

  axes() {
    const font = '12px system-ui, sans-serif';
    const common = {stroke: () => theme.muted, font, labelFont: font, ticks: {show: false},
                    grid: {stroke: () => theme.grid, width: 1}};
    return [
      {...common, label: 'step', labelSize: 16, labelGap: 0, size: 26, space: 55,
       incrs: [...Array(13).keys()].flatMap(power => [1, 2, 5].map(factor => factor * 10 ** power)),
       values: (u, ticks, axis, space, spacing) => ticks.map(tick => tickText(tick, spacing))},
      {...common, size: 58,
       splits: (u, axis, low, high) => this.isLog ? logTicks(low, high, u.height - 60)
                                                  : linearTicks(low, high, Math.max(2, (u.height - 60) / 42)),
       filter: (u, ticks) => ticks,
       values: (u, ticks) => {
         const isSmall = Math.max(...ticks.map(Math.abs)) < 0.01;
         return ticks.map(tick => tickText(tick, this.isLog ? 0 : ticks[1] - ticks[0], isSmall));
       }},
    ];
  }

  size() {
    const width = Math.max(120, this.plot.clientWidth);
    return {width, height: width < 500 ? 230 : this.isWide ? 330 : 260};
  }

  build() {
    if (this.u) this.u.destroy();
    const hover = {size: 7, fill: (u, i) => colorOf(this.spec.series[i - 1].color), width: 0};
    this.u = new uPlot({
      ...this.size(),
      legend: {show: false},
      padding: [14, 12, 0, 0],
      scales: {x: {time: false, range: () => zoom || allSteps},
               y: {distr: this.isLog ? 3 : 1, range: (u, low, high) => this.yRange(u, low, high)}},
      axes: this.axes(),
      series: [{}, ...this.spec.series.map((series, index) => this.seriesOptions(series, index))],
      cursor: {
        y: false, points: hover, drag: {x: true, y: false, setScale: false},
        sync: {key: 'steps', scales: ['x', null], setSeries: false,
               filters: {pub: type => type === 'mousemove' || type === 'mouseleave'}},
        bind: {dblclick: () => () => { setZoom(null); return null; }},
      },
      hooks: {
        draw: [u => { this.drawMarks(u); this.drawNotFinite(u); }],
        setCursor: [() => this.showValues()],
        setSelect: [u => this.onSelect(u)],
      },
    }, joined(this.spec.series, this.isLog), this.plot);
    this.plot.append(this.bubble);
    this.addTouch(this.u.over);
    this.showValues();
    this.showHidden();
    this.showZoom();
  }

  resize() {
    const size = this.size();
    if (size.width !== this.u.width || size.height !== this.u.height) this.u.setSize(size);
  }

  showZoom() {
    const [min, max] = zoom || allSteps;
    this.u.setScale('x', {min, max});
    this.reset.hidden = zoom === null;
  }

  onSelect(u) {
    const {left, width} = u.select;
    u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
    if (width < 6 || this.ignoreSelect) return;
    const range = [u.posToVal(left, 'x'), u.posToVal(left + width, 'x')];
    const middle = (range[0] + range[1]) / 2;
    setZoom(range[1] - range[0] < 1 ? [middle - 0.5, middle + 0.5] : range);
  }

  // uPlot listens to the mouse. A finger that moves sideways drags, too; up and down it scrolls the page.
  addTouch(over) {
    let lastTap = 0;
    const mouse = (type, event) => over.dispatchEvent(
        new MouseEvent(type, {clientX: event.clientX, clientY: event.clientY, button: 0, bubbles: true}));
    const isTouch = event => event.pointerType === 'touch' && event.isPrimary;
    over.addEventListener('pointerdown', event => {
      if (!isTouch(event)) return;
      mouse('mousemove', event);
      mouse('mousedown', event);
    });
    over.addEventListener('pointermove', event => { if (isTouch(event)) mouse('mousemove', event); });
    over.addEventListener('pointerup', event => {
      if (!isTouch(event)) return;
      mouse('mouseup', event);
      if (event.timeStamp - lastTap < 350) setZoom(null);
      lastTap = event.timeStamp;
    });
    over.addEventListener('pointercancel', event => {
      if (!isTouch(event)) return;
      this.ignoreSelect = true;
      mouse('mouseup', event);
      this.ignoreSelect = false;
    });
  }

  onKey(event) {
    const way = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === 'Escape') setZoom(null);
    if (!way) return;
    event.preventDefault();
    const steps = this.u.data[0], [min, max] = zoom || allSteps;
    const from = this.u.cursor.idx ?? (way > 0 ? -1 : steps.length);
    const index = Math.min(steps.length - 1, Math.max(0, from + way));
    if (steps[index] < min || steps[index] > max) return;
    this.u.setCursor({left: this.u.valToPos(steps[index], 'x'), top: 0});
  }

  // Values -----------------------------------------------------------------------------------------------------------

  showValues() {
    const u = this.u;
    if (!u) return;
    const isOver = u.cursor.left >= 0 && u.cursor.idx != null;
    const step = isOver ? u.data[0][u.cursor.idx] : null;
    const lasts = this.spec.series.map(series => series.x[series.x.length - 1]);
    const shown = step ?? Math.max(...lasts);
    this.at.textContent = (step === null ? 'last values, step ' : 'step ') + stepText(shown);
    this.spec.series.forEach((series, index) => {
      const point = pointAt(series, step), {value, far} = this.values[index];
      const isGap = point !== null && series.y[point] === null;
      value.textContent = point === null ? '–' : isGap ? 'not finite' : valueText(series.y[point]);
      far.textContent = point === null || series.x[point] === shown ? '' : `at ${stepText(series.x[point])}`;
    });
    this.showMark(isOver ? u.cursor.left : null);
  }

  visibleMarks() {
    const shows = run => this.spec.series.some((series, index) => series.run === run && !this.hidden.has(index));
    return data.runs.flatMap((run, index) => shows(index) ? run.marks.map(mark => ({...mark, run: index})) : []);
  }

  showMark(left) {
    const u = this.u;
    // The pointer is shared by all charts; the text belongs to the one that it is over.
    const isHere = left !== null && this.plot.matches(':hover, :focus-visible');
    const near = !isHere ? [] : this.visibleMarks().filter(
        mark => Math.abs(u.valToPos(mark.step, 'x') - left) <= 7);
    this.bubble.hidden = near.length === 0;
    if (near.length === 0) return;
    this.bubble.textContent = near.map(
        mark => `${mark.layout ? '◆' : '▸'} ${severalRuns ? data.runs[mark.run].name + ': ' : ''}${mark.text}`).join('\n');
    const plotLeft = u.over.offsetLeft, isRight = left > u.over.clientWidth / 2;
    this.bubble.style.left = isRight ? '' : `${plotLeft + left + 12}px`;
    this.bubble.style.right = isRight ? `${this.plot.clientWidth - plotLeft - left + 12}px` : '';
  }

  showHidden() {
    const count = this.isLog ? this.spec.series.reduce(
        (sum, series) => sum + series.y.filter(value => value !== null && value <= 0).length, 0) : 0;
    this.hiddenNote.textContent = `${count} drawn value${count === 1 ? '' : 's'} of 0 or below: not on a log axis`;
    if (count > 0) this.notes.append(this.hiddenNote); else this.hiddenNote.remove();
  }

  setShown(index, shown) {
    if (shown) this.hidden.delete(index); else this.hidden.add(index);
    press(this.values[index].button, shown);
    this.u.setSeries(index + 1, {show: shown});
  }

  // Drawing ----------------------------------------------------------------------------------------------------------

  // A dashed line with a triangle where a run was resumed, a solid one with a diamond where its layout changed.
  drawMarks(u) {
    const {ctx, bbox} = u, ratio = devicePixelRatio || 1;
    for (const mark of this.visibleMarks()) {
      const x = Math.round(u.valToPos(mark.step, 'x', true)) + 0.5, size = 5 * ratio;
      if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = severalRuns ? colorOf(mark.run) : theme.mark;
      ctx.lineWidth = ratio * (mark.layout ? 1.5 : 1);
      ctx.setLineDash(mark.layout ? [] : [4 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      const y = bbox.top - size;
      if (mark.layout) {
        ctx.moveTo(x, y - size); ctx.lineTo(x + size, y); ctx.lineTo(x, y + size); ctx.lineTo(x - size, y);
      } else {
        ctx.moveTo(x - 0.7 * size, y - size); ctx.lineTo(x + size, y); ctx.lineTo(x - 0.7 * size, y + size);
      }
      ctx.fill();
      ctx.restore();
    }
  }

  // A cross at the bottom for every step without a finite value.
  drawNotFinite(u) {
    const {ctx, bbox} = u, ratio = devicePixelRatio || 1, size = 4 * ratio;
    this.spec.series.forEach((series, index) => {
      if (this.hidden.has(index)) return;
      ctx.save();
      ctx.strokeStyle = colorOf(series.color);
      ctx.lineWidth = 1.6 * ratio;
      ctx.beginPath();
      series.y.forEach((value, i) => {
        const x = value === null ? u.valToPos(series.x[i], 'x', true) : NaN;
        if (!(x >= bbox.left && x <= bbox.left + bbox.width)) return;
        const y = bbox.top + bbox.height - 1.5 * size;
        ctx.moveTo(x - size, y - size); ctx.lineTo(x + size, y + size);
        ctx.moveTo(x - size, y + size); ctx.lineTo(x + size, y - size);
      });
      ctx.stroke();
      ctx.restore();
    });
  }
}

// A point between two gaps has no line, so it is drawn as a dot.
function alonePoints(u, index, show) {
  const column = u.data[index];
  const known = [];
  column.forEach((value, i) => { if (value !== undefined) known.push(i); });
  const has = place => place >= 0 && place < known.length && column[known[place]] !== null;
  if (show) return known.filter((i, place) => has(place));
  return known.filter((i, place) => has(place) && !has(place - 1) && !has(place + 1));
}

// A name in a legend hides its line; in a page of several runs, the whole run in every chart.
function toggle(chart, index) {
  const shown = chart.hidden.has(index), {run} = chart.spec.series[index];
  for (const one of severalRuns ? charts : [chart]) {
    one.spec.series.forEach((series, i) => {
      if (severalRuns ? series.run === run : i === index) one.setShown(i, shown);
    });
  }
}

// The page -----------------------------------------------------------------------------------------------------------

function addThemeSwitch() {
  const saved = () => { try { return localStorage.getItem('phalanx-theme'); } catch { return null; } };
  const save = name => { try { localStorage.setItem('phalanx-theme', name); } catch { /* not kept */ } };
  const place = document.getElementById('theme');
  place.setAttribute('role', 'group');
  place.setAttribute('aria-label', 'Colours');
  const buttons = ['system', 'light', 'dark'].map(name => {
    const button = element('button', {type: 'button', textContent: name[0].toUpperCase() + name.slice(1)});
    button.addEventListener('click', () => { save(name); choose(name); });
    place.append(button);
    return [name, button];
  });
  function choose(name) {
    if (name === 'system') delete root.dataset.theme; else root.dataset.theme = name;
    for (const [one, button] of buttons) press(button, one === name);
    redraw();
  }
  function redraw() {
    readTheme();
    for (const chart of charts) chart.u.redraw(false);
  }
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
  choose(['light', 'dark'].includes(saved()) ? saved() : 'system');
}

addThemeSwitch();
for (const figure of document.querySelectorAll('figure[data-chart]')) {
  const spec = data.charts[Number(figure.dataset.chart)];
  if (spec.series.length > 0) charts.push(new Chart(spec, figure));
}
const hasMarks = data.runs.some(run => run.marks.length > 0);
document.getElementById('hint').textContent = charts.length === 0 ? '' :
    'Drag across a chart to zoom all charts to these steps; double click to see all steps again. ' +
    (severalRuns ? 'A name in a legend hides the run in all charts. ' : 'A name in a legend hides its line. ') +
    (hasMarks ? '▸ and a dashed line: the run was resumed after this step. ◆ and a solid line: its layout changed. ' +
                'Point at a mark to read it.' : '');
})();
