#include "phalanx/report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/human.h"
#include "phalanx/base/svg.h"
#include "phalanx/report/chart.h"

namespace phalanx::train {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxPoints = 1200;

// Metrics by step; a later line of the same step replaces the earlier one.
struct Metrics {
  std::map<std::int64_t, json> steps;
  std::map<std::int64_t, json> validations;
};

std::string read_text(const std::string& path, const char* what) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw DataError(fmt::format("'{}' cannot be read ({}): expected {}, written by `phalanx train`", path,
                                std::strerror(errno), what));
  }
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Metrics read_metrics(const std::string& path) {
  std::istringstream lines(read_text(path, "the run's metrics"));
  Metrics metrics;
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    if (line.empty()) continue;
    const json entry = json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool usable = entry.is_object() && entry.contains("step") && entry["step"].is_number_integer();
    if (!usable) {
      if (lines.peek() == std::istringstream::traits_type::eof()) break;  // cut off in the middle of the last line
      throw DataError(fmt::format("{}:{}: expected a JSON object with an integer \"step\"", path, number));
    }
    auto& kind = entry.contains("validation_loss") ? metrics.validations : metrics.steps;
    kind[entry["step"].get<std::int64_t>()] = entry;
  }
  return metrics;
}

std::optional<double> number_of(const json& entry, const char* key) {
  const auto at = entry.find(key);
  if (at == entry.end() || !at->is_number()) return std::nullopt;
  return at->get<double>();
}

Points points_of(const std::map<std::int64_t, json>& entries, const char* key) {
  Points points;
  for (const auto& [step, entry] : entries) {
    if (const auto value = number_of(entry, key)) points.emplace_back(static_cast<double>(step), *value);
  }
  return points;
}

bool has(const Metrics& metrics, const char* key) {
  return std::ranges::any_of(metrics.steps, [&](const auto& step) { return number_of(step.second, key).has_value(); });
}

std::string text_of(const json& object, const char* key) {
  const auto at = object.find(key);
  if (at == object.end() || at->is_null()) return "";
  return at->is_string() ? at->get<std::string>() : at->dump();
}

const char* series_color(std::size_t index) {
  static constexpr const char* kColors[] = {"#2563eb", "#ea580c", "#059669", "#9333ea",
                                            "#0891b2", "#be123c", "#65a30d", "#475569"};
  return kColors[index % std::size(kColors)];
}

std::string loss_chart(const Metrics& metrics) {
  Chart chart{.title = "Loss", .unit = "nats per token", .wide = true};
  const Points train = thinned(points_of(metrics.steps, "loss"), kMaxPoints);
  if (train.size() > 60) {
    chart.series.push_back({.name = "train, each step", .color = series_color(0), .points = train, .faint = true});
    chart.series.push_back({.name = "train", .color = series_color(0), .points = smoothed(train, 8)});
  } else {
    chart.series.push_back({.name = "train", .color = series_color(0), .points = train});
  }
  const Points validation = points_of(metrics.validations, "validation_loss");
  if (!validation.empty()) {
    chart.series.push_back(
        {.name = "validation", .color = series_color(1), .points = validation, .markers = validation.size() <= 60});
  }
  return render_chart(chart);
}

std::string simple_chart(const Metrics& metrics, const char* key, std::string title, std::string unit, bool smooth) {
  Chart chart{.title = std::move(title), .unit = std::move(unit), .from_zero = true};
  const Points points = thinned(points_of(metrics.steps, key), kMaxPoints);
  if (smooth && points.size() > 60) {
    chart.series.push_back({.name = "each step", .color = series_color(0), .points = points, .faint = true});
    chart.series.push_back({.name = key, .color = series_color(0), .points = smoothed(points, 8)});
  } else {
    chart.series.push_back({.name = key, .color = series_color(0), .points = points});
  }
  return render_chart(chart);
}

std::string memory_chart(const Metrics& metrics) {
  Chart chart{.title = "Memory of each rank", .unit = "GiB, peak", .from_zero = true};
  std::vector<Points> ranks;
  for (const auto& [step, entry] : metrics.steps) {
    const auto memory = entry.find("memory_gib");
    if (memory == entry.end() || !memory->is_array()) continue;
    ranks.resize(std::max(ranks.size(), memory->size()));
    for (std::size_t rank = 0; rank < memory->size(); ++rank) {
      if ((*memory)[rank].is_number()) ranks[rank].emplace_back(step, (*memory)[rank].get<double>());
    }
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    chart.series.push_back(
        {.name = fmt::format("rank {}", rank), .color = series_color(rank), .points = thinned(ranks[rank], 400)});
  }
  return render_chart(chart);
}

std::string card(std::string_view name, std::string_view value) {
  if (value.empty()) return "";
  return fmt::format("<div class=\"card\"><b>{}</b><span>{}</span></div>", escape_markup(value), escape_markup(name));
}

std::string cards(const json& run, const Metrics& metrics) {
  std::string html;
  if (!metrics.steps.empty()) {
    const auto& [step, last] = *metrics.steps.rbegin();
    const auto planned = static_cast<std::int64_t>(number_of(run, "steps").value_or(static_cast<double>(step)));
    html += card("steps", step == planned ? with_commas(step)
                                          : fmt::format("{} of {}", with_commas(step), with_commas(planned)));
    if (const auto loss = number_of(last, "loss")) html += card("training loss", fmt::format("{:.4f}", *loss));
  }
  if (!metrics.validations.empty()) {
    const json& last = metrics.validations.rbegin()->second;
    if (const auto loss = number_of(last, "validation_loss")) {
      html += card("validation loss", fmt::format("{:.4f}", *loss));
      html += card("validation perplexity", fmt::format("{:.2f}", std::exp(*loss)));
    }
  }
  if (const auto entropy = number_of(run, "unigram_entropy")) {
    html += card("unigram entropy of the validation text", fmt::format("{:.4f}", *entropy));
  }
  double seconds = 0, tokens = 0;
  for (const auto& [step, entry] : metrics.steps) {
    seconds += number_of(entry, "seconds").value_or(0);
    tokens += number_of(entry, "tokens").value_or(0);
  }
  if (tokens > 0) html += card("tokens", with_commas(static_cast<std::int64_t>(tokens)));
  if (seconds > 0) {
    html += card("tokens/s, all ranks", with_commas(static_cast<std::int64_t>(tokens / seconds)));
    const auto whole = static_cast<std::int64_t>(seconds);
    html += card("time in steps", whole >= 3600 ? fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60)
                                  : whole >= 60 ? fmt::format("{} min {:02} s", whole / 60, whole % 60)
                                                : fmt::format("{:.1f} s", seconds));
  }
  if (const auto parameters = number_of(run, "parameters")) {
    html += card("parameters", with_commas(static_cast<std::int64_t>(*parameters)));
  }
  return html;
}

std::string table(const json& object) {
  std::string rows;
  for (const auto& [key, value] : object.items()) {
    rows += fmt::format("<tr><th>{}</th><td>{}</td></tr>", escape_markup(key),
                        escape_markup(value.is_string() ? value.get<std::string>() : value.dump()));
  }
  return fmt::format("<table>{}</table>", rows);
}

constexpr std::string_view kStyle = R"(
:root{color-scheme:light}
body{margin:0;background:#f6f7f9;color:#1f2937;font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0}h2{font-size:17px;margin:34px 0 10px}
.sub{color:#6b7280;margin:2px 0 20px}.status{font-weight:600}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:12px}
.card{background:#fff;border:1px solid #e5e7eb;border-radius:10px;padding:11px 14px}
.card b{display:block;font-size:20px;font-variant-numeric:tabular-nums}.card span{color:#6b7280;font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:16px;margin-top:20px}
figure{margin:0;background:#fff;border:1px solid #e5e7eb;border-radius:10px;padding:12px 14px 8px;position:relative}
figure.wide{grid-column:1/-1}figcaption{font-weight:600}figcaption small{color:#6b7280;font-weight:400}
svg{display:block;width:100%;height:auto;overflow:visible}
.grid{stroke:#eceef1}.axis{stroke:#9ca3af}.tick{fill:#6b7280;font-size:12px;font-variant-numeric:tabular-nums}
path{fill:none;stroke-linejoin:round}.line{stroke-width:2}.faint{stroke-width:1;opacity:.28}
.legend{position:absolute;right:16px;top:13px;font-size:13px;color:#374151}.legend span{margin-left:14px}
.legend i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}
.empty{color:#9ca3af}.cursor{stroke:#9ca3af;stroke-dasharray:3 3}
.tip{position:absolute;pointer-events:none;background:#111827;color:#fff;border-radius:6px;padding:5px 9px;
font-size:12.5px;line-height:1.45;white-space:nowrap;display:none;font-variant-numeric:tabular-nums}
.sample{background:#fff;border:1px solid #e5e7eb;border-radius:10px;padding:14px 18px;white-space:pre-wrap;
overflow-wrap:anywhere;font:14px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}.sample em{color:#6b7280;font-style:normal}
table{border-collapse:collapse;width:100%;background:#fff;border:1px solid #e5e7eb;border-radius:10px;overflow:hidden}
th,td{text-align:left;vertical-align:top;padding:6px 14px;border-bottom:1px solid #f0f1f3;font-size:14px;overflow-wrap:anywhere}
th{font-weight:500;color:#6b7280;width:220px}tr:last-child th,tr:last-child td{border-bottom:0}
details{background:#fff;border:1px solid #e5e7eb;border-radius:10px;padding:10px 16px}summary{cursor:pointer;font-weight:500}
pre{margin:10px 0 4px;overflow-x:auto;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media(max-width:520px){.charts{grid-template-columns:1fr}}
)";

constexpr std::string_view kScript = R"(
document.querySelectorAll('svg[data-chart]').forEach(svg=>{
  const chart=JSON.parse(svg.dataset.chart),[l,r]=chart.frame,[,,t,b]=chart.frame,figure=svg.parentElement;
  const tip=figure.appendChild(Object.assign(document.createElement('div'),{className:'tip'}));
  const line=document.createElementNS('http://www.w3.org/2000/svg','line');
  line.setAttribute('class','cursor');line.setAttribute('y1',t);line.setAttribute('y2',b);line.style.display='none';
  svg.appendChild(line);
  const show=v=>Math.abs(v)>=1000?Math.round(v).toLocaleString('en'):Number(v.toPrecision(5)).toString();
  svg.addEventListener('pointermove',e=>{
    const box=svg.getBoundingClientRect(),scale=box.width/svg.viewBox.baseVal.width;
    const x=chart.x[0]+((e.clientX-box.left)/scale-l)/(r-l)*(chart.x[1]-chart.x[0]);
    let at=null,rows='';
    for(const s of chart.series){
      let best=s.points[0];for(const p of s.points)if(Math.abs(p[0]-x)<Math.abs(best[0]-x))best=p;
      if(at===null)at=best[0];
      const row=document.createElement('span');row.textContent=s.name+': '+show(best[1]);
      rows+='<br>'+row.innerHTML;
    }
    tip.innerHTML='step '+Math.round(at)+rows;tip.style.display='block';
    const px=l+(at-chart.x[0])/(chart.x[1]-chart.x[0])*(r-l);
    line.setAttribute('x1',px);line.setAttribute('x2',px);line.style.display='';
    const left=svg.offsetLeft||(box.left-figure.getBoundingClientRect().left),right=px*scale>box.width*.6;
    tip.style.left=right?'':(left+px*scale+12)+'px';
    tip.style.right=right?(figure.clientWidth-left-px*scale+12)+'px':'';tip.style.top='52px';
  });
  svg.addEventListener('pointerleave',()=>{tip.style.display='none';line.style.display='none'});
});
)";

}  // namespace

std::string render_report(const std::string& run_folder) {
  const std::string run_path = run_folder + "/run.json";
  const json run = json::parse(read_text(run_path, "the description of a run"), nullptr, /*allow_exceptions=*/false);
  if (!run.is_object())
    throw DataError(fmt::format("'{}' is not a JSON object: was it written by `phalanx train`?", run_path));
  const Metrics metrics = read_metrics(run_folder + "/metrics.jsonl");

  const std::string description = text_of(run, "description"), status = text_of(run, "status");
  const std::string title = description.empty() ? "Phalanx training" : description;
  std::string html = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\"><title>{}</title><style>{}</style></head><body><main>",
      escape_markup(title), kStyle);
  html += fmt::format("<h1>{}</h1><p class=\"sub\"><span class=\"status\">{}</span>{}</p>", escape_markup(title),
                      escape_markup(status.empty() ? "unknown" : status), [&] {
                        std::string rest;
                        for (const char* key : {"model", "layout", "started"}) {
                          const std::string value = text_of(run, key);
                          if (!value.empty()) rest += " · " + escape_markup(value);
                        }
                        return rest;
                      }());
  html += fmt::format("<div class=\"cards\">{}</div>", cards(run, metrics));
  html += fmt::format("<div class=\"charts\">{}{}{}{}{}{}</div>", loss_chart(metrics),
                      simple_chart(metrics, "lr", "Learning rate", "", false),
                      simple_chart(metrics, "grad_norm", "Gradient norm", "before clipping", true),
                      simple_chart(metrics, "tps", "Throughput", "tokens/s of one device", true), memory_chart(metrics),
                      has(metrics, "exposed_percent")
                          ? simple_chart(metrics, "exposed_percent", "Exposed communication", "% of the step", true)
                          : std::string());
  const auto sample = run.find("sample");
  if (sample != run.end() && sample->is_object()) {
    html += fmt::format("<h2>Sample of the trained model</h2><div class=\"sample\"><em>{}</em>{}</div>",
                        escape_markup(text_of(*sample, "prompt")), escape_markup(text_of(*sample, "text")));
  }
  const auto environment = run.find("environment");
  if (environment != run.end() && environment->is_object()) html += "<h2>Environment</h2>" + table(*environment);
  html += fmt::format("<h2>Configuration</h2><details><summary>config.toml</summary><pre>{}</pre></details>",
                      escape_markup(text_of(run, "config")));
  html += fmt::format("</main><script>{}</script></body></html>\n", kScript);
  return html;
}

std::string write_report(const std::string& run_folder) {
  const std::string path = run_folder + "/report.html";
  replace_file(path, render_report(run_folder));
  return path;
}

}  // namespace phalanx::train
