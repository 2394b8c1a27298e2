#include "phalanx/report/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/human.h"
#include "phalanx/base/svg.h"
#include "phalanx/report/differences.h"
#include "phalanx/report/key_figures.h"
#include "phalanx/report/page_assets.h"
#include "phalanx/report/page_charts.h"
#include "phalanx/report/run_folder.h"
#include "phalanx/report/run_json.h"

namespace phalanx::report {
namespace {

using nlohmann::json;
using Runs = std::vector<RunFolder>;

std::string title_of(const RunFolder& run) {
  const std::string description = json_text(run.run, "description");
  return description.empty() ? "Phalanx training" : description;
}

std::string status_of(const RunFolder& run) {
  const std::string status = json_text(run.run, "status");
  return status.empty() ? "unknown" : status;
}

/// The name of a run with its colour.
std::string named_run(const Runs& runs, std::size_t run) {
  return fmt::format("<i class=\"swatch c{}{}\"></i>{}", run % 8, run < 8 ? "" : " dashed",
                     escape_markup(runs[run].name));
}

std::string cards(const RunFolder& run) {
  std::string html;
  for (const auto& [name, value] : key_figures(run)) {
    html +=
        fmt::format("<div class=\"card\"><b>{}</b><span>{}</span></div>", escape_markup(value), escape_markup(name));
  }
  return fmt::format("<div class=\"cards\">{}</div>", html);
}

/// A row for each name and a column for each run.
std::string run_table(const Runs& runs, const std::vector<ComparedValues>& rows) {
  std::string html;
  for (std::size_t run = 0; run < runs.size(); ++run) {
    html += fmt::format("<th scope=\"col\">{}</th>", named_run(runs, run));
  }
  html = fmt::format("<thead><tr><td></td>{}</tr></thead>", html);
  for (const ComparedValues& row : rows) {
    html += fmt::format("<tr><th scope=\"row\">{}</th>", escape_markup(row.name));
    for (const auto& value : row.values) {
      html += value ? fmt::format("<td>{}</td>", escape_markup(*value)) : "<td class=\"none\">not there</td>";
    }
    html += "</tr>";
  }
  return fmt::format("<div class=\"scroll\" tabindex=\"0\"><table class=\"runs\">{}</table></div>", html);
}

NamedValues run_values(const RunFolder& run) {
  NamedValues values = {{"title", title_of(run)}, {"folder", run.folder}, {"status", status_of(run)}};
  for (const char* key : {"model", "layout"}) {
    if (std::string value = json_text(run.run, key); !value.empty()) values.emplace_back(key, std::move(value));
  }
  for (auto& figure : key_figures(run)) values.push_back(std::move(figure));
  return values;
}

NamedValues environment_values(const RunFolder& run) {
  NamedValues values;
  const auto environment = run.run.find("environment");
  if (environment == run.run.end() || !environment->is_object()) return values;
  for (const auto& item : environment->items())
    values.emplace_back(item.key(), json_text(*environment, item.key().c_str()));
  return values;
}

std::vector<NamedValues> of_each(const Runs& runs, NamedValues (*values)(const RunFolder&)) {
  std::vector<NamedValues> lists;
  for (const RunFolder& run : runs) lists.push_back(values(run));
  return lists;
}

std::string difference_tables(const Runs& runs) {
  const auto section = [&](const char* title, const char* none, const std::vector<ComparedValues>& rows) {
    return fmt::format("<h2>{}</h2>{}", title,
                       rows.empty() ? fmt::format("<p class=\"empty\">{}</p>", none) : run_table(runs, rows));
  };
  const auto keys = [](const RunFolder& run) { return config_values(json_text(run.run, "config")); };
  return section("Configuration keys that differ", "The runs have the same configuration.",
                 differences(of_each(runs, keys))) +
         section("Environment that differs", "The runs have the same environment.",
                 differences(of_each(runs, environment_values)));
}

std::string mark_row(const Runs& runs, std::size_t run, const RunMark& mark) {
  const char* kind = mark.layout_changed ? "◆ layout changed" : mark.resumed ? "▸ resumed" : "changed";
  std::string layout = mark.layout.empty() ? "not recorded" : mark.layout;
  std::string note = mark.note;
  if (!mark.on_curve) note += fmt::format("{}later undone: not on the charts", note.empty() ? "" : "; ");
  const std::string time = utc_text(mark.time);
  return fmt::format("<tr>{}<td>{}</td><td>{}{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                     runs.size() > 1 ? fmt::format("<th scope=\"row\">{}</th>", named_run(runs, run)) : "",
                     with_commas(mark.step), kind, note.empty() ? "" : ": " + escape_markup(note),
                     escape_markup(layout),
                     !mark.resumed          ? "not recorded"
                     : mark.changes.empty() ? "none"
                                            : escape_markup(fmt::format("{}", fmt::join(mark.changes, "; "))),
                     time.empty() ? "not recorded" : time);
}

std::string mark_table(const Runs& runs) {
  std::string rows;
  for (std::size_t run = 0; run < runs.size(); ++run) {
    for (const RunMark& mark : runs[run].marks.marks) rows += mark_row(runs, run, mark);
  }
  if (rows.empty()) return "<h2>Resumes and layout changes</h2><p class=\"empty\">none recorded</p>";
  return fmt::format(
      "<h2>Resumes and layout changes</h2><div class=\"scroll\" tabindex=\"0\"><table class=\"marks\"><thead><tr>{}"
      "<th scope=\"col\">after step</th><th scope=\"col\">what</th><th scope=\"col\">layout</th>"
      "<th scope=\"col\">changed settings</th><th scope=\"col\">when</th></tr></thead>{}</table></div>",
      runs.size() > 1 ? "<th scope=\"col\">run</th>" : "", rows);
}

std::string notes_list(const Runs& runs) {
  std::string items;
  for (const RunFolder& run : runs) {
    for (const std::string& note : run.notes()) {
      items += fmt::format("<li>{}{}</li>", runs.size() > 1 ? escape_markup(run.name) + ": " : "", escape_markup(note));
    }
  }
  return items.empty() ? "" : fmt::format("<ul class=\"warnings\">{}</ul>", items);
}

std::string plain_table(const NamedValues& values) {
  std::string rows;
  for (const auto& [name, value] : values) {
    rows += fmt::format("<tr><th scope=\"row\">{}</th><td>{}</td></tr>", escape_markup(name), escape_markup(value));
  }
  return fmt::format("<table class=\"plain\">{}</table>", rows);
}

std::string sample_of(const RunFolder& run) {
  const auto sample = run.run.find("sample");
  if (sample == run.run.end() || !sample->is_object()) return "";
  return fmt::format("<div class=\"sample\"><em>{}</em>{}</div>", escape_markup(json_text(*sample, "prompt")),
                     escape_markup(json_text(*sample, "text")));
}

/// What each run has for itself: sample, environment and configuration.
std::string run_sections(const Runs& runs) {
  std::string samples, rest;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const RunFolder& run = runs[i];
    const std::string whose = runs.size() > 1 ? named_run(runs, i) + ": " : "";
    if (const std::string sample = sample_of(run); !sample.empty()) {
      samples += (whose.empty() ? "" : fmt::format("<h3>{}</h3>", named_run(runs, i))) + sample;
    }
    if (const NamedValues environment = environment_values(run); !environment.empty()) {
      rest += fmt::format("<details{}><summary>{}environment</summary>{}</details>", runs.size() > 1 ? "" : " open",
                          whose, plain_table(environment));
    }
    rest += fmt::format("<details><summary>{}config.toml</summary><pre tabindex=\"0\">{}</pre></details>", whose,
                        escape_markup(json_text(run.run, "config")));
  }
  if (!samples.empty()) samples = "<h2>Sample of the trained model</h2>" + samples;
  return samples + "<h2>Environment and configuration</h2>" + rest;
}

std::string sub_title(const RunFolder& run) {
  std::string text = fmt::format("<span class=\"status\">{}</span>", escape_markup(status_of(run)));
  for (const char* key : {"model", "layout"}) {
    if (const std::string value = json_text(run.run, key); !value.empty()) text += " · " + escape_markup(value);
  }
  return text;
}

std::string page(const Runs& runs) {
  const bool is_alone = runs.size() == 1;
  const std::string title = is_alone ? title_of(runs[0]) : fmt::format("Comparison of {} runs", runs.size());
  const auto charts = page_charts(runs);
  std::string html = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">{}"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><meta name=\"generator\" "
      "content=\"phalanx report\"><title>{}</title><style>{}</style><style>{}</style></head><body><main>",
      content_security_policy(), escape_markup(title), kUplotStyle.text, kReportStyle.text);
  html += fmt::format("<header><div><h1>{}</h1><p class=\"sub\">{}</p></div><div id=\"theme\"></div></header>",
                      escape_markup(title), is_alone ? sub_title(runs[0]) : "one colour per run in all charts");
  html += notes_list(runs);
  html += is_alone ? cards(runs[0]) : run_table(runs, side_by_side(of_each(runs, run_values)));
  html +=
      "<noscript><p class=\"warnings\">The charts need JavaScript. The figures and tables do not.</p></noscript>"
      "<p id=\"hint\"></p><div class=\"charts\">";
  for (std::size_t i = 0; i < charts.size(); ++i) html += chart_figure(charts[i], i);
  html += "</div>" + mark_table(runs);
  if (!is_alone) html += difference_tables(runs);
  html += run_sections(runs);
  html += fmt::format("<footer>Charts are drawn by uPlot (MIT licence).</footer></main>\n<!--\n{}-->\n",
                      kUplotLicense.text);
  const std::string data = page_data(runs, charts).dump(-1, ' ', false, json::error_handler_t::replace);
  return html + fmt::format(
                    "<script type=\"application/json\" id=\"data\">{}</script>\n<script>{}</script>\n"
                    "<script>{}</script></body></html>\n",
                    json_for_script(data), kUplotScript.text, kReportScript.text);
}

void require_different(const std::vector<std::string>& folders) {
  std::set<std::filesystem::path> seen;
  for (const std::string& folder : folders) {
    std::error_code error;
    const auto whole = std::filesystem::weakly_canonical(folder, error);
    if (!error && !seen.insert(whole).second) {
      throw UsageError(fmt::format("'{}' is named twice: expected different runs", folder));
    }
  }
}

}  // namespace

std::string render_report(const std::string& run_folder) {
  return render_comparison(std::vector<std::string>{run_folder});
}

std::string write_report(const std::string& run_folder) {
  std::string path = run_folder + "/report.html";
  replace_file(path, render_report(run_folder));
  return path;
}

std::string render_comparison(const std::vector<std::string>& run_folders) {
  if (run_folders.size() > kMaxRunsOfReport) {
    throw UsageError(fmt::format("{} runs in one report: expected at most {}, so that their lines can be told apart",
                                 run_folders.size(), kMaxRunsOfReport));
  }
  require_different(run_folders);
  Runs runs;
  for (const std::string& folder : run_folders) runs.push_back(read_run(folder));
  if (std::ranges::none_of(runs, &RunFolder::has_metrics))
    read_metrics(run_folders.front() + "/metrics.jsonl");  // throws, and says why
  name_by_folder(runs);
  return page(runs);
}

void write_comparison(const std::vector<std::string>& run_folders, const std::string& path) {
  replace_file(path, render_comparison(run_folders));
}

}  // namespace phalanx::report
