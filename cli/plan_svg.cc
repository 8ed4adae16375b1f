#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

#include "cli/plan.h"

namespace kvferry::cli {
namespace {

constexpr double kBox = 72, kGap = 26, kTop = 84, kLeft = 40, kApart = 420;
constexpr std::array<std::string_view, 8> kColours{"#1f6feb", "#d1242f", "#1a7f37", "#8250df",
                                                   "#bf8700", "#0b7285", "#c2255c", "#57606a"};

// Extent of the whole model's KV cache and of its state.
struct Extent {
  std::uint32_t layers = 1, heads = 1;
};

void grow(Extent& extent, const plan::PlannedRank& rank) {
  for (const Slab& slab : rank.layout.slabs) {
    if (slab.component == Component::kAux) continue;
    extent.layers = std::max(extent.layers, slab.layer + 1);
    if (!state_of(slab.component))
      extent.heads = std::max(extent.heads, slab.head_begin + slab.head_count);
  }
}

// A rank: the frame is the whole model, layers downwards and heads to the right; what is filled it
// holds, in grey where it holds state alone.
std::string draw_rank(const plan::PlannedRank& rank, const Extent& extent, double x, double y,
                      std::string_view colour) {
  std::string out;
  for (const bool state : {true, false}) {
    for (const Slab& slab : rank.layout.slabs) {
      const bool is_state = state_of(slab.component).has_value();
      if (slab.component == Component::kAux || is_state != state) continue;
      if (slab.component == Component::kValue) continue;  // lies where its key lies
      const double top = y + kBox * slab.layer / extent.layers, height = kBox / extent.layers;
      const double left = is_state ? x : x + kBox * slab.head_begin / extent.heads;
      const double width = is_state ? kBox : kBox * slab.head_count / extent.heads;
      out += fmt::format(
          "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\" "
          "fill-opacity=\"{}\"/>\n",
          left, top, width, height, is_state ? "#8c959f" : colour, is_state ? 0.18 : 0.55);
    }
  }
  out += fmt::format(
      "<rect x=\"{}\" y=\"{:.1f}\" width=\"{}\" height=\"{}\" fill=\"none\" "
      "stroke=\"#24292f\"/>\n<text x=\"{}\" y=\"{:.1f}\">{}</text>\n",
      x, y, kBox, kBox, x, y - 5, rank.name);
  return out;
}

}  // namespace

std::string draw_plan(const std::vector<plan::PlannedRank>& sources,
                      const std::vector<plan::PlannedRank>& targets,
                      const std::vector<PlanArrow>& arrows, const std::string& title) {
  Extent extent;
  for (const auto* side : {&sources, &targets}) {
    for (const plan::PlannedRank& rank : *side) grow(extent, rank);
  }
  const double step = kBox + kGap;
  const double height =
      kTop + step * static_cast<double>(std::max(sources.size(), targets.size())) + 20;
  const double right = kLeft + kBox + kApart;
  // The shorter side stands in the middle of the longer one.
  const auto place = [&](std::size_t rank, std::size_t count) {
    const double spare =
        static_cast<double>(std::max(sources.size(), targets.size()) - count) * step / 2;
    return kTop + spare + static_cast<double>(rank) * step;
  };
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" "
      "fill=\"white\"/>\n<text x=\"{}\" y=\"24\" font-size=\"15\">{}</text>\n<text x=\"{}\" "
      "y=\"42\" fill=\"#57606a\">a box is the whole model: {} layers downwards, {} heads to the "
      "right</text>\n<text x=\"{}\" y=\"56\" fill=\"#57606a\">filled is what the rank holds, grey "
      "its state; wider arrows move more bytes</text>\n",
      right + kBox + 40, height, kLeft, title, kLeft, extent.layers, extent.heads, kLeft);
  std::uint64_t most = 1;
  for (const PlanArrow& arrow : arrows) most = std::max(most, arrow.bytes);
  for (const PlanArrow& arrow : arrows) {
    const double y1 = place(arrow.source, sources.size()) + kBox / 2,
                 y2 = place(arrow.target, targets.size()) + kBox / 2;
    const double x1 = kLeft + kBox + 3, x2 = right - 9, bend = kApart * 0.45;
    const double wide =
        std::max(0.8, 9 * std::sqrt(static_cast<double>(arrow.bytes) / static_cast<double>(most)));
    const auto colour = kColours[arrow.source % kColours.size()];
    out += fmt::format(
        "<path d=\"M{:.1f},{:.1f} C{:.1f},{:.1f} {:.1f},{:.1f} {:.1f},{:.1f}\" fill=\"none\" "
        "stroke=\"{}\" stroke-width=\"{:.1f}\" stroke-opacity=\"0.6\"><title>{} to {}: {} "
        "bytes</title></path>\n<path d=\"M{:.1f},{:.1f} l-7,-4 l0,8 z\" fill=\"{}\"/>\n",
        x1, y1, x1 + bend, y1, x2 - bend, y2, x2, y2, colour, wide, sources[arrow.source].name,
        targets[arrow.target].name, arrow.bytes, x2 + 6, y2, colour);
  }
  for (std::size_t i = 0; i < sources.size(); ++i)
    out += draw_rank(sources[i], extent, kLeft, place(i, sources.size()),
                     kColours[i % kColours.size()]);
  for (std::size_t i = 0; i < targets.size(); ++i)
    out += draw_rank(targets[i], extent, right, place(i, targets.size()), "#57606a");
  return out + "</svg>\n";
}

}  // namespace kvferry::cli
