#include "cli/bench/svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string_view>

#include <fmt/format.h>

namespace kvferry::cli {
namespace {

constexpr double kWidth = 760, kHeight = 460, kLeft = 70, kRight = 180, kTop = 50, kBottom = 60;
constexpr std::array<std::string_view, 4> kColours{"#1f6feb", "#d1242f", "#1a7f37", "#8250df"};

struct Point {
  double row = 0, value = 0, floor = 0, limit = 0;
};

double row_bytes(const std::string& name) {
  return name.ends_with('k') ? std::stod(name) * 1024 : std::stod(name);
}

}  // namespace

std::string draw_planes(const std::vector<Figure>& figures, const std::string& machine) {
  std::map<std::string, std::vector<Point>> ways;
  double most = 1, least_row = 1e18, most_row = 1;
  for (const Figure& f : figures) {
    if (!f.name.starts_with("plane.")) continue;
    const auto dot = f.name.rfind('.');
    const double row = row_bytes(f.name.substr(dot + 1));
    ways[f.name.substr(6, dot - 6)].push_back({row, f.value, f.baseline, f.limit});
    most = std::max({most, f.value, f.baseline, f.limit});
    least_row = std::min(least_row, row);
    most_row = std::max(most_row, row);
  }
  const double span = std::max(1.0, std::log2(most_row / least_row));
  const auto x = [&](double row) {
    return kLeft + (kWidth - kLeft - kRight) * std::log2(row / least_row) / span;
  };
  const auto y = [&](double value) {
    return kHeight - kBottom - (kHeight - kTop - kBottom) * value / (most * 1.05);
  };
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      "<text x=\"{}\" y=\"20\" font-size=\"15\">Throughput over row size</text>\n"
      "<text x=\"{}\" y=\"36\" fill=\"#57606a\">{}</text>\n",
      kWidth, kHeight, kLeft, kLeft, machine);
  const double step = most > 8 ? 2 : most > 3 ? 1 : 0.5;
  for (double v = 0; v <= most * 1.05; v += step) {
    out += fmt::format(
        "<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#d0d7de\"/>\n"
        "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
        kLeft, kWidth - kRight, y(v), y(v), kLeft - 8, y(v) + 4, v);
  }
  out += fmt::format("<text x=\"16\" y=\"{}\" transform=\"rotate(-90 16 {})\">GB/s</text>\n",
                     kHeight / 2, kHeight / 2);
  const auto line = [&](const std::vector<Point>& points, double Point::*field,
                        std::string_view colour, std::string_view dash) {
    std::string path;
    for (const Point& p : points) path += fmt::format("{:.1f},{:.1f} ", x(p.row), y(p.*field));
    return fmt::format(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" "
        "stroke-dasharray=\"{}\"/>\n",
        path, colour, dash);
  };
  std::size_t number = 0;
  double label = kTop + 10;
  for (auto& [way, points] : ways) {
    std::sort(points.begin(), points.end(),
              [](const Point& a, const Point& b) { return a.row < b.row; });
    const auto colour = kColours[number++ % kColours.size()];
    out += line(points, &Point::value, colour, "") + line(points, &Point::floor, colour, "6 3") +
           line(points, &Point::limit, colour, "1 4");
    for (const Point& p : points) {
      out += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", x(p.row),
                         y(p.value), colour);
      if (number == 1)
        out += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f} B</text>\n",
                           x(p.row), kHeight - kBottom + 20, p.row);
    }
    for (const auto& [text, dash] : {std::pair{std::string(way), ""},
                                     {std::string(way) + ", floor", "6 3"},
                                     {std::string(way) + ", limit", "1 4"}}) {
      out += fmt::format(
          "<line x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\" stroke=\"{}\" stroke-width=\"2\" "
          "stroke-dasharray=\"{}\"/><text x=\"{}\" y=\"{}\">{}</text>\n",
          kWidth - kRight + 12, kWidth - kRight + 40, label, label, colour, dash,
          kWidth - kRight + 46, label + 4, text);
      label += 18;
    }
    label += 8;
  }
  return out + "</svg>";
}

}  // namespace kvferry::cli
