// `node check.mjs DASHBOARD.json ...`: is each a dashboard by Grafana's own types, option by option?
import { execFileSync } from "node:child_process";
import { readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
// Panels whose options and field options have types of their own; others are refused.
const panels = { stat: "Stat", timeseries: "TimeSeries" };

const lines = [
  'import type { Dashboard, Panel, RowPanel } from "@grafana/schema";',
  ...Object.entries(panels).map(
    ([kind, name]) =>
      `import type * as ${name} from "@grafana/schema/dist/esm/raw/composable/${kind}/panelcfg/x/${name}PanelCfg_types.gen";`,
  ),
  // The JSON of an enumeration is its text.
  "type Json<T> = T extends string ? `${T}` : T extends (infer U)[] ? Json<U>[]",
  "  : T extends object ? { [K in keyof T]: Json<T[K]> } : T;",
  "interface Target { refId: string; datasource: { type: string; uid: string }; expr: string; legendFormat: string; instant?: true }",
];
for (const [number, file] of process.argv.slice(2).entries()) {
  const dashboard = JSON.parse(readFileSync(file, "utf8"));
  lines.push(`export const dashboard${number}: Json<Dashboard> = ${JSON.stringify(dashboard, null, 1)};`);
  for (const panel of dashboard.panels.filter((one) => one.type !== "row")) {
    const name = panels[panel.type];
    if (!name) throw new Error(`${file}: no types are named here for a panel of type ${panel.type}`);
    const typed = (what, type, value) =>
      lines.push(`export const ${what}${number}_${panel.id}: ${type} = ${JSON.stringify(value)};`);
    typed("options", `Json<${name}.Options>`, panel.options);
    if (panel.type === "timeseries")
      typed("custom", `Json<${name}.FieldConfig>`, panel.fieldConfig.defaults.custom);
    typed("targets", "Target[]", panel.targets);
  }
}
const source = join(here, "dashboards.check.ts");
try {
  writeFileSync(source, lines.join("\n"));
  execFileSync(
    process.execPath,
    [join(here, "node_modules", "typescript", "bin", "tsc"), "--noEmit", "--strict",
      "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler", source],
    { stdio: "inherit", cwd: here },
  );
} finally {
  rmSync(source, { force: true });
}
console.log(`${process.argv.length - 2} dashboards are as Grafana's types want them`);
