"""The report: figures by hand, folders that are no run's, and the page in a real browser."""

import math
import os
import zipfile

import numpy as np
import pytest

from tests.scripts.loading import load_script
from tests.scripts.run_folders import STEPS, recording, write_run

for library in ("jinja2", "plotly", "scipy"):
    pytest.importorskip(library, reason="the extra `report` is not installed")
report = load_script("report")

from reporting import aggregate, browser, detail, page, runs  # noqa: E402  # found through the script
from reporting.charts import OPTION_COLORS, number  # noqa: E402
from reporting.episodes import Recording, characteristic_frames, option_figures, values  # noqa: E402
from reporting.joints import component_names  # noqa: E402

from callbacks.episode_drawing import PALETTE  # noqa: E402


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three seeds with options and all that can be recorded, and an older run of K = 1 with neither."""
    base = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        write_run(base / f"options_{seed}", seed=seed, gain=1.0 + 0.1 * seed)
    write_run(base / "plain", num_options=1, gain=0.5, moments=0, has_health=False)
    return base


@pytest.fixture(scope="module")
def groups(folders):
    return runs.group_runs([runs.read_run(folder) for folder in sorted(folders.iterdir())])


@pytest.fixture(scope="module")
def html(groups):
    return page.render(groups, moments=3)


def record(tmp_path, **changes):
    """A recording as the report reads it, with some arrays replaced."""
    file = tmp_path / "0000001000.npz"
    np.savez(file, **{**recording(), **changes})
    return Recording(file)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_run_is_read_with_its_counters(groups):
    run = groups[0].runs[1]
    assert (run.task, run.num_options, run.seed, run.env_steps) == ("Hand-v0", 4, "1", STEPS)
    assert run.minutes == pytest.approx(39 * 7.5 / 60)
    assert run.curves["val/return"].last == pytest.approx(1.1) and len(run.curves["val/return"].values) == 5
    assert [event.event for event in run.events] == ["start", "death", "restart"]
    assert run.events[1].detail == 'exit status -9, "killed"'


def test_runs_that_differ_in_their_seed_alone_are_one_group(groups):
    assert [[run.seed for run in group.runs] for group in groups] == [["0", "1", "2"], ["0"]]
    assert [group.name for group in groups] == ["A: K = 4", "B: K = 1"]
    assert runs.differences(groups) == {"model.num_options": ["4", "1"]}


def test_runs_of_one_seed_are_told(tmp_path):
    found = [runs.Run(tmp_path / str(i), config={"seed_everything": seed}) for i, seed in enumerate((7, 8, 7))]
    unknown = [runs.Run(tmp_path / name) for name in "ab"]
    (group, _) = runs.group_runs([*found, *unknown])
    assert group.runs == found
    assert [len(run.notes) for run in (*found, *unknown)] == [0, 0, 1, 0, 0]
    assert str(found[0].folder) in found[2].notes[0]


def test_callbacks_that_only_look_make_no_other_group():
    def config(*callbacks):
        return {"trainer": {"callbacks": [{"class_path": name} for name in callbacks]}}

    assert runs.essential(config("callbacks.EpisodeVideo")) == runs.essential(config())
    assert runs.essential(config("callbacks.NoveltyBonus")) != runs.essential(config())


def test_a_last_record_that_is_half_written_costs_nothing_else(tmp_path):
    write_run(tmp_path / "run", moments=0)
    (file,) = (tmp_path / "run").glob("events*")
    whole = runs.read_run(tmp_path / "run")
    os.truncate(file, file.stat().st_size - 5)
    (tmp_path / "run" / "worker_events.csv").write_text(
        "seconds,env_steps,worker,event,detail\n1,2,worker_0,start,\n3,"
    )
    torn = runs.read_run(tmp_path / "run")
    assert torn.curves["rollout/return"].values.tolist() == whole.curves["rollout/return"].values.tolist()
    assert len(torn.events) == 1


def test_a_recording_that_is_torn_is_left_out_and_told(folders, tmp_path):
    write_run(tmp_path / "run", moments=2)
    last = sorted((tmp_path / "run" / "episodes").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:300])
    run = runs.read_run(tmp_path / "run")
    found = detail.describe(runs.Group("A", [run]), 5)
    assert len(found.moments) == 1 and last.name in run.notes[-1]


def test_a_recording_that_is_damaged_within_is_told(tmp_path):
    file = tmp_path / "0000001000.npz"
    np.savez_compressed(file, **recording())
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
        start = archive.getinfo("frames.npy").header_offset + 80
    content = file.read_bytes()
    file.write_bytes(content[:start] + b"\xff" * 40 + content[start + 40 :])  # zlib.error, or a wrong checksum
    with pytest.raises(runs.ReportError, match=r"0000001000.npz cannot be read"):
        Recording(file)
    members["frames.npy"] = members["frames.npy"].replace(b"), }", b"),  ", 1)
    with zipfile.ZipFile(file, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    with pytest.raises(runs.ReportError, match=r"0000001000.npz cannot be read \(TokenError\)"):
        Recording(file)


def test_counts_of_a_histogram_are_moved_to_equal_bins():
    class Histogram:
        min, max = 0.25, 0.95
        bucket_limit, bucket = [0.3, 0.5, 1e300], [1.0, 2.0, 1.0]

    # [0.25, 0.3] is in the second quarter-bin, [0.3, 0.5] too, [0.5, 0.95] over two.
    shares = runs.rebin(Histogram(), 4)
    np.testing.assert_allclose(shares, [0.0, 0.75, 0.25 * 0.25 / 0.45, 0.25 * 0.2 / 0.45])


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda folder: None, "is not there"),
        (lambda folder: folder.touch(), "is no folder"),
        (lambda folder: folder.mkdir(), "is no run's folder; give one that holds TensorBoard events"),
        (lambda folder: write_run(folder / "version_3", moments=0), "version_3"),
        (lambda folder: (folder.mkdir(), (folder / "config.yaml").write_text("a: 1")), "has no TensorBoard events"),
        (
            lambda folder: (
                folder.mkdir(),
                (folder / "events.out.tfevents.1.x").write_bytes(b"nothing of the kind" * 9),
            ),
            "no logged values",
        ),
    ],
)
def test_folders_that_cannot_be_reported_are_one_line(tmp_path, capsys, make, words):
    folder = tmp_path / "run"
    make(folder)
    assert report.main([str(folder), "--output", str(tmp_path / "report.html")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"report: error: {folder} ") and words in line
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("output", ["missing/report.html", ".", "/dev/null"])
def test_an_output_that_cannot_be_written_is_one_line(folders, tmp_path, monkeypatch, capsys, output):
    monkeypatch.setattr(report, "render", lambda groups, moments: "page")
    assert report.main([str(folders / "plain"), "--output", str(tmp_path / output)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"report: error: --output {tmp_path / output} ")
    assert list(tmp_path.iterdir()) == []


def test_a_page_is_replaced_by_a_whole_one_only(folders, tmp_path, monkeypatch):
    file = tmp_path / "report.html"
    file.write_text("<!doctype html>old")
    monkeypatch.setattr(report, "render", lambda groups, moments: "\ud800")  # cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        report.main([str(folders / "plain"), "--output", str(file)])
    assert file.read_text() == "<!doctype html>old" and list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_no_page_is_not_replaced(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "render", lambda groups, moments: "<!DOCTYPE html>new")
    file = tmp_path / "config.yaml"
    file.write_text("precious")
    assert report.main([str(folders / "plain"), "--output", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"report: error: --output {file} is there, and no page; give another name")
    assert file.read_text() == "precious"
    for content in ("", "\n<!doctype html>old"):
        file.write_text(content)
        assert report.main([str(folders / "plain"), "--output", str(file)]) == 0
        assert file.read_text() == "<!DOCTYPE html>new"


# -- figures over seeds -----------------------------------------------------------------------------------------------


def test_iqm_and_interval_are_over_runs():
    found = aggregate.estimate([0.0, 1.0, 2.0, 9.0])
    assert found.center == 1.5 and found.is_interval and 0.0 <= found.low < 1.5 < found.high <= 9.0
    pair = aggregate.estimate([1.0, 3.0, math.nan])
    assert (pair.center, pair.low, pair.high, pair.is_interval) == (2.0, 1.0, 3.0, False)
    assert aggregate.estimate([math.nan]) is None


def test_probability_of_improvement_counts_pairs():
    found = aggregate.probability_of_improvement([1.0, 2.0, 3.0], [2.0, 0.0, 0.0])
    assert found.center == pytest.approx((2 + 2.5 + 3) / 9) and found.low < found.center < found.high
    assert aggregate.probability_of_improvement([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]).low == 1.0


def test_a_band_takes_the_runs_that_got_so_far():
    def curve(steps, number):
        return runs.Curve(np.array(steps, float), np.array(steps, float), np.full(len(steps), number))

    found = aggregate.band([curve([0, 10], 1.0), curve([0, 5, 10, 15, 20], 3.0)], "steps")
    assert found.x.tolist() == [0, 5, 10, 15, 20] and found.count.tolist() == [2, 2, 2, 1, 1]
    assert found.center.tolist() == [2, 2, 2, 3, 3] and found.low.tolist() == [1, 1, 1, 3, 3]


def test_thinning_keeps_peaks_and_ends():
    y = np.zeros(50_000)
    y[31_234], y[777] = 9.0, -9.0
    x, thinned = aggregate.thin(np.arange(50_000), y)
    assert len(x) <= aggregate.MAX_POINTS and {9.0, -9.0} <= set(thinned) and (x[0], x[-1]) == (0, 49_999)


def test_groups_are_compared_where_all_of_them_have_been(groups, tmp_path):
    write_run(tmp_path / "long", num_options=2, gain=0.5, moments=0)
    longer = runs.read_run(tmp_path / "long")
    for name, curve in longer.curves.items():
        longer.curves[name] = runs.Curve(2 * curve.steps, curve.minutes, curve.values)
    charts, words = page.compare([groups[0], runs.Group("B", [longer])])
    assert "20,000 environment steps" in words
    # At half of its training the second one is at 0.4 of its gain, its evaluation at 16,000 steps.
    assert charts[0].figure.data[1].x[0] == pytest.approx(0.2, abs=0.01)


# -- episodes ---------------------------------------------------------------------------------------------------------


def test_spells_end_where_an_option_is_chosen_anew_and_with_the_episode(tmp_path):
    option = np.array([0, 0, 1, 1, 1, 2, 2])
    arrays = recording(episodes=1, length=7)
    switched = np.array([1, 0, 1, 1, 0, 0, 0], bool)
    step, episode = np.array([0, 1, 2, 3, 4, 0, 1]), np.array([0, 0, 0, 0, 0, 1, 1])
    np.savez(tmp_path / "1.npz", **{**arrays, "option": option, "switched": switched, "step": step, "episode": episode})
    found = [(s.option, s.first, s.length, s.is_complete) for s in Recording(tmp_path / "1.npz").spells()]
    assert found == [(0, 0, 2, True), (1, 2, 1, True), (1, 3, 2, False), (2, 5, 2, False)]


def test_figures_of_options(tmp_path):
    found = option_figures(record(tmp_path))
    # 40 steps, four options of five steps each in turn: option 1 runs at steps 5 to 9 and 25 to 29.
    one = found[1]
    assert (one.share, one.duration, one.spells) == (0.25, 5.0, 4)
    assert one.follows.tolist() == [0, 0, 1, 0] and found[3].follows.tolist() == [1, 0, 0, 0]
    np.testing.assert_allclose(one.phases, [0, 0.75, 0.5, 0, 0, 0, 0.75, 0.5, 0, 0])
    assert one.components[0] == 1 and one.differences[0] == pytest.approx((0.8 - 0.2) / (0.8 * math.sqrt(0.25 * 0.75)))
    # It arrives at steps 6 to 10 and ends at the last of them.
    assert one.ends == pytest.approx((4 * 0.1 + 0.9) / 5)
    assert "option 2 most often follows (100\N{NO-BREAK SPACE}%)" in detail.sentence(
        one, 1, component_names("Hand-v0", 6), False
    )


def test_joints_of_the_shadow_hand_have_names():
    names = component_names("HandReachDense-v3", 20)
    assert len(set(names)) == 20 and (names[2], names[11], names[19]) == (
        "index finger sideways", "palm below the little finger", "thumb bend",
    )  # fmt: skip
    assert component_names("AdroitHandPen-v1", 24)[:2] == ["component 0", "component 1"]


def test_an_option_that_never_ran_is_told(tmp_path):
    arrays = recording()
    idle = option_figures(record(tmp_path, option=np.minimum(arrays["option"], 2)))[3]
    assert idle.share == 0 and math.isnan(idle.duration) and "never ran" in detail.sentence(idle, 3, [], False)


def test_discrete_actions_are_counted(tmp_path):
    arrays = recording()
    one = option_figures(record(tmp_path, action=arrays["option"]))[1]
    assert one.components[0] == 1 and "takes action 1 more often" in detail.sentence(
        one, 1, component_names("FourRooms", 4, True), True
    )


def test_frames_of_an_option_show_it(tmp_path):
    found = record(tmp_path)
    for option in range(4):
        chosen = characteristic_frames(found, option)
        shown = [int(found.option[found.of(int(found.frame_episode[i]))[found.frame_step[i]]]) for i in chosen]
        assert 1 <= len(chosen) <= 3 and set(shown) == {option}


def test_returns_of_an_episode_that_ended_by_itself_are_whole(tmp_path):
    arrays = recording(episodes=1, length=3, pictures=2)
    last = np.array([False, False, True])
    arrays |= {"reward": np.array([1.0, 2.0, 4.0], np.float32), "terminated": last, "truncated": ~last & last}
    found = values(record(tmp_path, **arrays))
    np.testing.assert_allclose(found.obtained, [1 + 0.9 * (2 + 0.9 * 4), 2 + 0.9 * 4, 4], rtol=1e-6)
    assert found.tail.tolist() == [0, 0, 0] and found.completed.tolist() == found.obtained.tolist()


def test_returns_that_the_time_limit_cut_are_told_and_completed(tmp_path):
    arrays = recording(episodes=1, length=3, pictures=2)
    arrays |= {"reward": np.array([1.0, 2.0, 4.0], np.float32), "q": np.full((3, 4), 10.0, np.float32)}
    found = values(record(tmp_path, **arrays))
    np.testing.assert_allclose(found.obtained, [1 + 0.9 * (2 + 0.9 * 4), 2 + 0.9 * 4, 4], rtol=1e-6)
    np.testing.assert_allclose(found.tail, [0.9**3, 0.9**2, 0.9], rtol=1e-6)
    np.testing.assert_allclose(found.completed, [1 + 0.9 * (2 + 0.9 * 10), 2 + 0.9 * 10, 10], rtol=1e-6)


# -- the page ---------------------------------------------------------------------------------------------------------


def test_what_a_run_does_not_have_names_the_callback(groups):
    missing = detail.describe(groups[1], 3).missing
    assert "EpisodeVideo" in missing["episodes"] and "K = 1" in missing["options"]
    assert "WorkerHealth" in missing["machine"] and "WorkerHealth" in missing["events"]


def test_older_runs_with_options_are_told_what_to_add(tmp_path):
    write_run(tmp_path / "run", moments=0, has_histograms=False)
    missing = detail.describe(runs.Group("A", [runs.read_run(tmp_path / "run")]), 3).missing
    assert "EpisodeVideo" in missing["options"] and "OptionDiagnostics" in missing["heats"]


def test_texts_of_a_run_are_no_markup(tmp_path):
    write_run(tmp_path / "run", moments=0, task="</script><b id=x>")
    text = page.render(runs.group_runs([runs.read_run(tmp_path / "run")]))
    assert "<b id=x>" not in text and "&lt;b id=x&gt;" in text


def test_moments_are_spread_from_the_first_to_the_last():
    assert detail.evenly(9, 3) == [0, 4, 8] and detail.evenly(2, 5) == [0, 1] and detail.evenly(7, 1) == [0]


def test_numbers_for_readers():
    assert [number(each) for each in (437_000, -0.5123, 0.0, 12.0, math.nan)] == [
        "437,000",
        "-0.512",
        "0",
        "12",
        "unknown",
    ]


def test_no_two_options_share_a_colour():
    assert len(set(OPTION_COLORS)) == len(OPTION_COLORS)


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium of the system."""
    pytest.importorskip("playwright", reason="the extra `report-png` is not installed")
    if browser.find_chromium() is None:
        pytest.skip("no Chromium: apt-get install --no-install-recommends chromium")
    with browser.chromium() as found:
        yield found


class Opened:
    """The page in the browser, with what it has said and asked for."""

    def __init__(self, chromium, file, width, **settings):
        self.context = chromium.new_context(viewport={"width": width, "height": 844}, offline=True, **settings)
        self.context.set_default_timeout(browser.PATIENCE)
        self.said, self.asked = [], []
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def draw(self):
        """Draw all visible charts; how many of them there are, and how many have drawn nothing."""
        self.page.evaluate("drawAll()")
        return self.page.evaluate(
            """() => {
              const shown = [...document.querySelectorAll(".plot")].filter((each) => each.offsetParent);
              const marks = ".trace, .bars, .heatmaplayer image, .points path, .js-line";
              return [shown.length, shown.filter((each) => !each.querySelector(marks)).map((each) => each.ariaLabel)];
            }"""
        )

    def choose(self, name, value):
        """As a finger would: on the label."""
        self.page.locator(f'label:has(input[name="{name}"][value="{value}"])').click()


@pytest.fixture(scope="module", params=[1280, 390])
def opened(request, chromium, html, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(html)
    phone = {"has_touch": True, "is_mobile": True} if request.param == 390 else {}
    found = Opened(chromium, file, request.param, color_scheme="dark" if phone else "light", **phone)
    yield found
    assert found.said == [] and found.asked == [file.as_uri()]
    found.context.close()


def test_page_in_a_browser(opened):
    """Every part is there, charts have drawn, choosers choose, nothing is wider than the screen."""
    sheet = opened.page
    for part in ("headline", "curves", "comparison", "detail", "config"):
        assert sheet.locator(f"section#{part}").is_visible()
    for part in ("episode", "options", "usage", "termination", "values", "lag", "machine", "events"):
        assert sheet.locator(f'[data-part="{part}"]').first.is_visible()
    count, empty = opened.draw()
    assert count == 32 and empty == []
    width = "document.documentElement.scrollWidth - innerWidth"
    assert sheet.evaluate(width) == 0

    opened.choose("axis", 1)
    assert sheet.get_by_text("Return over wall time").is_visible()
    assert not sheet.get_by_text("Return over environment steps").is_visible()
    opened.choose("moment-0", 0)
    opened.choose("episode-0-0", 1)
    assert sheet.get_by_text("Episode 2 after 6,666 steps of training").is_visible()
    assert opened.draw()[1] == []

    # The player: a frame of the strip that is touched is shown, and its step marked in the timeline.
    episode = sheet.locator(".episode:visible")
    frame = episode.locator(".frame").nth(5)
    frame.click()
    assert f"step {frame.get_attribute('data-step')}," in episode.locator(".now").inner_text()
    assert episode.locator(".player input").input_value() == "5"
    assert frame.get_attribute("aria-current") == "step"
    timeline = episode.locator(".plot").first
    assert timeline.evaluate("(each) => each.layout.shapes[0].x0") == float(frame.get_attribute("data-step"))

    opened.choose("run", 1)
    assert sheet.get_by_text("K = 1: one policy without options").is_visible()
    assert opened.draw()[1] == [] and sheet.evaluate(width) == 0


def test_choosers_are_of_the_size_of_a_finger(opened):
    sizes = opened.page.evaluate(
        "[...document.querySelectorAll('.chooser label, .controls button, nav a, summary')]"
        ".filter((e) => e.offsetParent).map((e) => e.getBoundingClientRect().height)"
    )
    assert len(sizes) > 10 and min(sizes) >= 44


def test_charts_have_words_for_those_who_cannot_see_them(opened):
    words = opened.page.evaluate("[...document.querySelectorAll('.plot')].map((each) => each.ariaLabel)")
    assert all(len(each) > 20 for each in words) and len(words) > 30
    assert opened.page.evaluate("[...document.images].every((each) => each.hasAttribute('alt'))")


def test_pictures_are_taken_of_the_parts_that_are_asked_for(chromium, groups, tmp_path):
    text = page.render(groups[1:])
    files = browser.take_pictures(chromium, text, tmp_path / "new", ["curves", "lag", "comparison"], width=600)
    # One group alone is compared with nothing.
    assert [file.name for file in files] == ["curves.png", "lag.png"]
    with page_image(files[1]) as image:
        assert image.width <= 600 and image.height > 300 and image.mode == "P"


def page_image(file):
    from PIL import Image

    return Image.open(file)


def test_pictures_without_a_browser_are_refused_in_one_line(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "render", lambda groups, moments: "page")
    monkeypatch.setattr(browser.shutil, "which", lambda name: None)
    pytest.importorskip("playwright")
    arguments = [str(folders / "plain"), "--output", str(tmp_path / "r.html"), "--png", str(tmp_path / "png")]
    assert report.main(arguments) == 1
    assert "apt-get install" in capsys.readouterr().err


def test_options_have_the_colours_of_their_videos():
    assert [f"#{r:02X}{g:02X}{b:02X}" for r, g, b in PALETTE] == list(OPTION_COLORS)
