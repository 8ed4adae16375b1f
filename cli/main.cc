// kvferry: the command-line tool.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "cli/bench/bench.h"
#include "cli/demo.h"
#include "cli/demo_rank.h"
#include "cli/models.h"
#include "cli/plan.h"
#include "kvferry/bootstrap_server.h"
#include "kvferry/config.h"
#include "src/base/parse.h"

namespace kvferry::cli {
namespace {

Result<Settings> settings_from_environment() {
  Settings settings;
  const Status status = apply_environment(
      settings, [](const char* name) -> const char* { return std::getenv(name); });
  if (!status.ok()) return status;
  return settings;
}

int run_bootstrap(const std::string& host, std::uint16_t port) {
  const auto settings = settings_from_environment();
  if (!settings.ok()) {
    fmt::print(stderr, "kvferry bootstrap: {}\n", settings.status().message());
    return kExitUsage;
  }
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal_number : {SIGINT, SIGTERM}) sigaddset(&signals, signal_number);
  pthread_sigmask(SIG_BLOCK, &signals,
                  nullptr);  // before the server's thread exists, so that it inherits the mask
  auto server = BootstrapServer::create(host, port, *settings);
  if (!server.ok()) {
    fmt::print(stderr, "kvferry bootstrap: {}\n", server.status().message());
    return 1;
  }
  fmt::print("bootstrap server listens on {}\n",
             Address{std::string(without_brackets(host)), (*server)->port()}.host_port());
  std::fflush(stdout);
  int received = 0;
  sigwait(&signals, &received);
  return 0;
}

int run_config() {
  const auto settings = settings_from_environment();
  if (!settings.ok()) {
    fmt::print(stderr, "kvferry config: {}\n", settings.status().message());
    return kExitUsage;
  }
  const auto defaults = setting_rows(Settings{});
  const auto rows = setting_rows(*settings);
  fmt::print("{:<27}{:<56}{:<6}{:<12}{:<12}{:<18}{}\n", "name", "environment", "unit", "default",
             "value", "range", "meaning");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    fmt::print("{:<27}{:<56}{:<6}{:<12}{:<12}{:<18}{}\n", rows[i].name, rows[i].environment,
               rows[i].unit, defaults[i].value, rows[i].value, rows[i].range, rows[i].meaning);
  }
  return 0;
}

}  // namespace

int run(int argc, char** argv) {
  CLI::App app{"kvferry moves KV caches from prefill ranks to decode ranks."};
  app.require_subcommand(1);
  app.set_version_flag("--version", KVFERRY_VERSION);

  DemoOptions demo;
  std::string prefill = "tp=2,pp=1,dp=1", decode = "tp=4", scale = "auto";
  auto* demo_command =
      app.add_subcommand("demo", "move KV caches between real processes and verify every byte");
  demo_command
      ->add_option("--model", demo.model,
                   "a built-in geometry (" + fmt::format("{}", fmt::join(model_names(), ", ")) +
                       ") or the path of a config.json")
      ->capture_default_str();
  demo_command->add_option("--prefill", prefill, "cut of the prefill side")->capture_default_str();
  demo_command->add_option("--decode", decode, "cut of the decode side")->capture_default_str();
  demo_command
      ->add_option("--plane", demo.plane, "data plane: tcp, shm, or auto (shm where it reaches)")
      ->capture_default_str();
  demo_command
      ->add_option("--shared-directory", demo.shared_directory, "where the ranks of one host meet")
      ->capture_default_str();
  demo_command->add_flag(
      "--private-memory", demo.private_memory,
      "prefill pools in memory that no other process may map: shm takes its rings");
  demo_command
      ->add_option("--codec", demo.codec,
                   "native, or sglang: the reference's messages on both sides")
      ->check(CLI::IsMember({"native", "sglang"}))
      ->capture_default_str();
  demo_command->add_option("--page-size", demo.page_size, "tokens of a page")
      ->check(CLI::Range(1U, 65536U))
      ->capture_default_str();
  demo_command
      ->add_option("--decode-page-size", demo.decode_page_size,
                   "tokens of a page on the decode side; 0: as on the prefill side")
      ->check(CLI::Range(0U, 65536U))
      ->capture_default_str();
  demo_command->add_option(
      "--trace", demo.trace,
      "requests from a file of JSON lines (timestamp, input_length, hash_ids)");
  demo_command->add_option("--requests", demo.requests, "number of requests; caps a trace")
      ->check(CLI::Range(1ULL, 10000000ULL));
  demo_command
      ->add_option("--tokens", demo.tokens, "prompt tokens of each made request, before scaling")
      ->check(CLI::Range(1ULL, 16777216ULL));
  demo_command->add_option("--concurrency", demo.concurrency, "requests under way at once")
      ->check(CLI::Range(1U, 4096U))
      ->capture_default_str();
  demo_command
      ->add_option("--scale", scale, "divides token counts: a factor, or auto (2 to 4 GB in all)")
      ->capture_default_str();
  demo_command
      ->add_option("--speed", demo.speed,
                   "arrivals at this multiple of the trace's speed; 0: as fast as it goes")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  demo_command->add_option("--json", demo.json, "write the numbers to this file");
  demo_command
      ->add_option("--sabotage", demo.sabotage, "damage one block on purpose: wrong, stray or drop")
      ->check(CLI::IsMember({"wrong", "stray", "drop"}));

  PlanOptions plan;
  auto* plan_command = app.add_subcommand(
      "plan",
      "who sends what to whom between two instances, and the proof that every byte arrives");
  plan_command->add_option("--model", plan.model, "as for demo")->capture_default_str();
  plan_command
      ->add_option("--prefill", plan.prefill,
                   "cut of the prefill side (tp=2,pp=1,cp=1), or a JSON file with its layouts")
      ->capture_default_str();
  plan_command->add_option("--decode", plan.decode, "the same of the decode side")
      ->capture_default_str();
  plan_command
      ->add_option("--codec", plan.codec, "native, or sglang: as the reference's ranks pair")
      ->check(CLI::IsMember({"native", "sglang"}))
      ->capture_default_str();
  plan_command->add_option("--tokens", plan.tokens, "of one request, whose bytes are counted")
      ->check(CLI::Range(1U, 1U << 24))
      ->capture_default_str();
  plan_command->add_option("--page-size", plan.page_size, "tokens of a page")
      ->check(CLI::Range(1U, 65536U))
      ->capture_default_str();
  plan_command
      ->add_option("--decode-page-size", plan.decode_page_size,
                   "tokens of a page on the decode side; 0: as on the prefill side")
      ->check(CLI::Range(0U, 65536U))
      ->capture_default_str();
  plan_command->add_flag("--all-cp-ranks", plan.all_cp_ranks,
                         "every context-parallel rank sends its part of the pages");
  plan_command->add_option("--json", plan.json, "write the plan and the verdict to this file");
  plan_command->add_option("--svg", plan.svg, "draw ranks, layers, heads and arrows");
  plan_command->add_option("--save-layouts", plan.save_layouts,
                           "write PREFIX-prefill.json and PREFIX-decode.json, to change and to "
                           "give back as --prefill and --decode");

  std::string host = "127.0.0.1";
  std::uint16_t port = 8998;
  auto* bootstrap_command = app.add_subcommand("bootstrap", "run a bootstrap server alone");
  bootstrap_command->add_option("--host", host, "where to listen")->capture_default_str();
  bootstrap_command->add_option("--port", port, "0: any free port, which is printed")
      ->capture_default_str();

  auto* config_command = app.add_subcommand(
      "config", "print every setting, its variable, default, value, range and meaning");
  BenchOptions bench;
  auto* bench_command =
      app.add_subcommand("bench", "measure; every figure beside a baseline of the same run");
  add_bench_options(*bench_command, bench);
  auto* rank_command =
      app.add_subcommand("demo-rank", "one rank of a demo (started by it)")->group("");
  auto* bench_rank_command =
      app.add_subcommand("bench-target", "the receiving side of a bench (started by it)")
          ->group("");

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : kExitUsage;
  }
  if (*rank_command) return run_demo_rank();
  if (*bench_rank_command) return run_bench_target();
  if (*bootstrap_command) return run_bootstrap(host, port);
  if (*config_command) return run_config();
  if (*bench_command) return run_bench(bench);
  if (*plan_command) return run_plan(plan);
  if (*demo_command) {
    const auto usage = [](const std::string& why) {
      fmt::print(stderr, "kvferry demo: {}\n", why);
      return kExitUsage;
    };
    const auto p = parse_cut(prefill), d = parse_cut(decode);
    if (!p.ok()) return usage("--prefill: " + p.status().message());
    if (!d.ok()) return usage("--decode: " + d.status().message());
    demo.prefill = *p;
    demo.decode = *d;
    if (scale != "auto") {
      char* end = nullptr;
      const double factor = std::strtod(scale.c_str(), &end);
      if (end == scale.c_str() || *end != '\0' || !(factor > 0))
        return usage("--scale: '" + scale + "' is neither auto nor a positive factor");
      demo.scale = factor;
    }
    return run_demo(demo);
  }
  return kExitUsage;
}

}  // namespace kvferry::cli

int main(int argc, char** argv) {
  return kvferry::cli::run(argc, argv);
}
